# An image in which Horovod works, with hvd_averaging and its demos (docs/container.md says more).
#
#   docker build -t hvd_averaging .
#   docker run hvd_averaging                                                                          the demo
#   docker run -v "$PWD:/mine" -w /mine hvd_averaging horovodrun -np 4 --gloo python train.py         your training
#
# BASE is Debian 12 or 13, or Ubuntu 22.04 or 24.04. For GPUs, BASE is such a system with the CUDA toolkit (a "devel"
# image) of the CUDA version that PyTorch is made for, and GPU=nccl; what the image is run on needs no toolkit:
#
#   docker build --build-arg BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04 --build-arg RUNTIME_BASE=ubuntu:24.04 \
#       --build-arg GPU=nccl -t hvd_averaging:gpu .

ARG BASE=debian:12
# What the image is made of. The same system as BASE, since Python and Open MPI come from there.
ARG RUNTIME_BASE=${BASE}

# ---- the builder: compilers, headers, and what they make, in /opt/venv --------------------------------------------

FROM ${BASE} AS builder
# "nccl", or nothing for CPUs.
ARG GPU=
# PyTorch alone, TensorFlow alone, or both; for GPUs, PyTorch alone.
ARG FRAMEWORKS=
# Another place to take Python packages from: of PyTorch's builds for CPUs, say, which are smaller by gigabytes.
ARG PIP_EXTRA_INDEX_URL=

RUN apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
        ca-certificates g++ libopenmpi-dev make openmpi-bin python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY constraints.txt .
RUN if [ -z "$FRAMEWORKS" ]; then FRAMEWORKS="torch tensorflow-cpu"; [ -z "$GPU" ] || FRAMEWORKS=torch; fi \
    && python3 -m venv /opt/venv \
    && pip install -q -c constraints.txt $FRAMEWORKS numpy cmake packaging setuptools wheel

# For other processors than the builder's, such as "-mavx -mf16c".
ARG HOROVOD_BUILD_ARCH_FLAGS
# The builder alone, so that the minutes of compiling are spent again only when it or the above has changed.
COPY hvd_averaging/build_horovod hvd_averaging/build_horovod
RUN python -m hvd_averaging.build_horovod --with-mpi --cache-dir /tmp/horovod ${GPU:+--gpu $GPU} \
    && rm -rf /tmp/horovod

COPY . .
RUN pip install -q --no-build-isolation -c constraints.txt '.[cli,demo]' \
    && pip uninstall -q -y cmake wheel

# ---- the image ----------------------------------------------------------------------------------------------------

FROM ${RUNTIME_BASE}
RUN apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
        openmpi-bin openssh-client python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --shell /bin/bash horovod

COPY --from=builder /opt/venv /opt/venv
COPY --chown=horovod:horovod examples /home/horovod/examples

# One thread for each rank, as every rank has a part of the cores only; no chat from TensorFlow; and Open MPI must not
# read the memory of the rank beside it, which containers do not let it do.
ENV PATH=/opt/venv/bin:$PATH \
    OMP_NUM_THREADS=1 \
    TF_CPP_MIN_LOG_LEVEL=3 TF_ENABLE_ONEDNN_OPTS=0 \
    OMPI_MCA_btl_vader_single_copy_mechanism=none
USER horovod
WORKDIR /home/horovod
CMD ["horovodrun", "-np", "4", "--gloo", "python", "examples/torch_local_sgd.py"]
