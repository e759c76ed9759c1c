"""The deep learning frameworks of the running interpreter, told from their files: importing one takes seconds."""

from __future__ import annotations

import runpy
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from hvd_averaging.build_horovod.errors import BuildError
from hvd_averaging.build_horovod.target import Part


def find_torch(wanted: bool = True) -> Part:
    """PyTorch, named by its own version: unlike pip's, that one tells builds for CPU and CUDA apart."""
    version = _torch_facts().get("__version__") if wanted else None
    switch = "HOROVOD_WITH_PYTORCH" if version else "HOROVOD_WITHOUT_PYTORCH"
    return Part(version, {switch: "1"})


def find_tensorflow(wanted: bool = True) -> Part:
    """TensorFlow, under whichever of its distribution names it was installed."""
    name = None
    if wanted and find_spec("tensorflow"):
        distributions = metadata.packages_distributions().get("tensorflow", [])
        name = next((f"{metadata.version(found)} ({found.replace('_', '-')})" for found in distributions), None)
    switch = "HOROVOD_WITH_TENSORFLOW" if name else "HOROVOD_WITHOUT_TENSORFLOW"
    return Part(name, {switch: "1"})


def require_framework(torch: Part, tensorflow: Part) -> None:
    """Raise `BuildError` where there is neither."""
    if torch.name is None and tensorflow.name is None:
        raise BuildError(
            "neither PyTorch nor TensorFlow was found to build Horovod against",
            f"install one, or leave out --without-...; for example: {sys.executable} -m pip install torch",
        )


def torch_cuda_version() -> str | None:
    """The CUDA version that the installed PyTorch was made for, such as "13.0"; None for a PyTorch without CUDA."""
    return _torch_facts().get("cuda")


def _torch_facts() -> dict[str, str | None]:
    """What PyTorch's own `version.py` says; that file imports nothing of PyTorch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))
