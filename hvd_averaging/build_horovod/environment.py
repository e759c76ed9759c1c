"""What this machine offers, put together: the target to build for and the variables that tell Horovod's build so."""

from __future__ import annotations

import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hvd_averaging.build_horovod import frameworks, gpu, toolchain
from hvd_averaging.build_horovod.target import Part, Target

# True of every build. Bundled Gloo and flatbuffers ask for a CMake so old that CMake 4 refuses them otherwise; NVTX,
# a profiler's marks, would come from a CUDA toolkit that a CPU build must not touch.
_ALWAYS = {
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITHOUT_NVTX": "1",
}


@dataclass(frozen=True)
class Wanted:
    """What the user asks for. `mpi` is None for "if it is there"."""

    torch: bool = True
    tensorflow: bool = True
    mpi: bool | None = None
    gpu: str | None = None


@dataclass(frozen=True)
class Environment:
    """The target to build for, the variables to build it with, and remarks that the user should read."""

    target: Target
    variables: dict[str, str]
    remarks: tuple[str, ...]


def find_environment(wanted: Wanted, links: Path) -> Environment:
    """Look at the machine and the running interpreter. `links` is the folder for `gpu.find_nccl`.

    Raises:
        BuildError: something that the build cannot do without is missing.
    """
    torch, tensorflow = frameworks.find_torch(wanted.torch), frameworks.find_tensorflow(wanted.tensorflow)
    frameworks.require_framework(torch, tensorflow)
    compiler = toolchain.find_compiler()
    mpi = toolchain.find_mpi(wanted.mpi)
    nccl = gpu.find_nccl(links) if wanted.gpu else Part(None)
    target = Target(
        python=str(sysconfig.get_config_var("SOABI")),
        platform=" ".join([sysconfig.get_platform(), *platform.libc_ver()]),
        compiler=str(compiler.name),
        flags=f"{compiler.variables['HOROVOD_BUILD_ARCH_FLAGS']} {toolchain.user_flags()}".strip(),
        torch=torch.name,
        tensorflow=tensorflow.name,
        mpi=mpi.name,
        gpu=nccl.name,
    )
    toolchain.require_compiler_features(compiler.variables["CXX"], target.cxx_standard)
    variables = dict(_ALWAYS)
    for part in (torch, tensorflow, compiler, mpi, nccl):
        variables |= part.variables
    return Environment(target, variables, tuple(_remarks(wanted, target)))


def _remarks(wanted: Wanted, target: Target) -> Iterator[str]:
    if target.mpi is None and wanted.mpi is None:
        yield f"MPI was not found: Horovod will have Gloo only (for MPI as well: {toolchain.MPI_REMEDY})"
    cuda = frameworks.torch_cuda_version()
    if target.torch and target.gpu is None and cuda:
        yield f"PyTorch is made for CUDA {cuda}, Horovod will work on CPU tensors (for GPUs: --gpu nccl, needs nvcc)"
