"""NCCL for a build with `--gpu nccl`: the CUDA toolkit, and the NCCL library that PyTorch brings along."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

from hvd_averaging.build_horovod.commands import output_of, which
from hvd_averaging.build_horovod.errors import BuildError
from hvd_averaging.build_horovod.frameworks import torch_cuda_version
from hvd_averaging.build_horovod.target import Part

# Used where no GPU can be asked: A100 and H100.
_USUAL_CAPABILITIES = "80,90"
_NVCC_REMEDY = "install the CUDA toolkit and name its folder in CUDA_HOME, or build for CPU by leaving out --gpu"


def find_nccl(links: Path) -> Part:
    """CUDA and NCCL for PyTorch on GPUs. `links` is a lasting folder, for the link that the linker looks for.

    Raises:
        BuildError: PyTorch is not made for CUDA, or the toolkit or NCCL is missing or does not fit.
    """
    wanted = torch_cuda_version()
    if wanted is None:
        raise BuildError(
            "--gpu nccl needs a PyTorch made for CUDA, and the installed one is not",
            "install a CUDA build of PyTorch, or leave out --gpu",
        )
    home = _cuda_home()
    cuda = _toolkit_version(home)
    if cuda.split(".")[0] != wanted.split(".")[0]:
        raise BuildError(f"the CUDA toolkit is {cuda}, but PyTorch was made for CUDA {wanted}", _NVCC_REMEDY)
    include, library = _nccl_files()
    capabilities = _compute_capabilities()
    return Part(
        f"NCCL {_nccl_version(include)}, CUDA {cuda}, compute capabilities {capabilities}",
        {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_NCCL_INCLUDE": str(include),
            "HOROVOD_NCCL_LIB": str(_linkable(library, links)),
            "HOROVOD_NCCL_LINK": "SHARED",
            "CUDA_HOME": str(home),
            "HOROVOD_CUDA_HOME": str(home),
            "HOROVOD_BUILD_CUDA_CC_LIST": capabilities,
        },
    )


def _cuda_home() -> Path:
    named = os.environ.get("HOROVOD_CUDA_HOME") or os.environ.get("CUDA_HOME")
    if named:
        return Path(named)
    nvcc = which("nvcc")
    # `nvcc` on PATH may be a link or a small script elsewhere; only the compiler itself knows its toolkit's folder.
    verbose = output_of(["bash", "-c", '"$0" --dryrun -x cu /dev/null 2>&1', nvcc]) if nvcc else None
    top = re.search(r"^#\$ TOP=(.+)$", verbose or "", re.MULTILINE)
    if top is None:
        raise BuildError("nvcc, the CUDA compiler, was not found", _NVCC_REMEDY)
    return Path(top[1]).resolve()


def _toolkit_version(home: Path) -> str:
    version = re.search(r"release (\d+\.\d+)", output_of([str(home / "bin" / "nvcc"), "--version"]) or "")
    if version is None:
        raise BuildError(f"there is no working bin/nvcc in {home}", _NVCC_REMEDY)
    return version[1]


def _nccl_files() -> tuple[Path, Path]:
    """The include folder and the library of NCCL: the user's, where named, else those in PyTorch's `nvidia-nccl`."""
    include, library = os.environ.get("HOROVOD_NCCL_INCLUDE"), os.environ.get("HOROVOD_NCCL_LIB")
    if include and library:
        return Path(include), Path(library) / "libnccl.so"
    # A namespace package of many distributions, so it may have several folders.
    spec = find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        nccl = Path(folder) / "nccl"
        if (nccl / "include" / "nccl.h").is_file() and (nccl / "lib" / "libnccl.so.2").is_file():
            return nccl / "include", nccl / "lib" / "libnccl.so.2"
    raise BuildError(
        "NCCL was not found",
        "install PyTorch's nvidia-nccl package, or name NCCL's folders in HOROVOD_NCCL_INCLUDE and HOROVOD_NCCL_LIB",
    )


def _nccl_version(include: Path) -> str:
    numbers = dict(re.findall(r"#define NCCL_(MAJOR|MINOR|PATCH) +(\d+)", (include / "nccl.h").read_text()))
    return ".".join(numbers.get(name, "?") for name in ("MAJOR", "MINOR", "PATCH"))


def _linkable(library: Path, links: Path) -> Path:
    """A folder where the linker finds `library` under the name it looks for, without a version."""
    if library.name == "libnccl.so":
        return library.parent
    links.mkdir(parents=True, exist_ok=True)
    link = links / "libnccl.so"
    link.unlink(missing_ok=True)
    link.symlink_to(library)
    return links


def _compute_capabilities() -> str:
    """Comma-separated, such as "80,90": the user's choice, else this machine's GPUs, else the usual ones."""
    own = os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST")
    if own:
        return own
    listed = output_of(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]) or ""
    return ",".join(sorted({line.strip().replace(".", "") for line in listed.split()})) or _USUAL_CAPABILITIES
