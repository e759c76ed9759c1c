"""Proof that the installed Horovod works: what it says of itself, and an average per framework and controller."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from hvd_averaging.build_horovod.commands import base_environment
from hvd_averaging.build_horovod.errors import BuildError, known_symptom
from hvd_averaging.build_horovod.target import Target

_SECONDS = 300
_REMEDY = "build anew with --force; if that does not help, report it with this message"


def check_build(target: Target) -> None:
    """Compare `horovodrun --check-build` with `target`.

    Raises:
        BuildError: a framework, controller or operation that the wheel was built for is not there.
    """
    horovodrun = Path(sysconfig.get_path("scripts")) / "horovodrun"
    shown = _finish(_start([str(horovodrun), "--check-build"]), "horovodrun --check-build")
    available = set(re.findall(r"\[X\] (\w+)", shown))
    missing = expected(target) - available
    if missing:
        raise BuildError(f"the installed Horovod lacks {', '.join(sorted(missing))}:\n{shown}", _REMEDY)


def check_averages(target: Target) -> None:
    """Average a tensor over one rank, in each framework under each controller; the frameworks at the same time.

    Raises:
        BuildError: one of them fails or takes unreasonably long.
    """
    probe = Path(__file__).with_name("probe.py").read_text(encoding="utf-8")
    controllers = ["gloo", "mpi"] if target.mpi else ["gloo"]
    frameworks = [name for name in ("torch", "tensorflow") if target.has(name)]
    running = {name: _start([sys.executable, "-c", probe, name, *controllers]) for name in frameworks}
    for name, process in running.items():
        _finish(process, f"an allreduce over one rank with {name}")


def expected(target: Target) -> set[str]:
    """What `--check-build` must mark as available, in its words."""
    words = {"PyTorch": target.torch, "TensorFlow": target.tensorflow, "MPI": target.mpi, "NCCL": target.gpu}
    return {"Gloo"} | {word for word, part in words.items() if part}


def _start(command: list[str]) -> subprocess.Popen[str]:
    environment = base_environment() | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    # From the root folder: what lies in the current one must not be imported instead of what is installed.
    return subprocess.Popen(
        command, cwd="/", env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def _finish(process: subprocess.Popen[str], what: str) -> str:
    try:
        output, _ = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise BuildError(f"{what} did not end within {_SECONDS} seconds", _REMEDY) from None
    if process.returncode != 0:
        problem, remedy = known_symptom(output) or (f"{what} failed", _REMEDY)
        raise BuildError(f"{problem}:\n{output.strip()[-2000:]}", remedy)
    return output
