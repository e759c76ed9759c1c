"""One ``horovodrun`` that cannot outlive its time limit: what its ranks print is shown as it comes, and kept."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

HOROVODRUN = Path(sys.executable).with_name("horovodrun")
TAG = re.compile(r"^\[\d+(?:,\d+)?\]<(?:stdout|stderr)>: ?")  # before every line, by the launcher

ENVIRONMENT = {  # more ranks than cores, possibly by root, and no chat of TensorFlow, which horovodrun imports
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
CHAT = re.compile(r"^(WARNING: All log messages before absl|I0000 00:00:)|^\s*$")


@dataclass(frozen=True)
class Launched:
    """A launch that has ended; ``returncode`` is 124 if its time was over."""

    returncode: int
    output: str


def run_python(
    np: int,
    arguments: Sequence[str],
    limit_s: float,
    *,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    enter: Sequence[str] = (),
) -> Launched:
    """Run Python with these arguments on ``np`` ranks.

    Args:
        np: ranks.
        arguments: of Python.
        limit_s: seconds after which all processes are ended.
        options: of horovodrun, such as ``--mpi``.
        environment: beyond this process's own.
        enter: a command before horovodrun, such as one that enters a namespace.
    """
    threads = str(max(1, (os.cpu_count() or 1) // np))  # all ranks are on this machine, even if on two hosts
    command = [*enter, str(HOROVODRUN), "-np", str(np), "--disable-cache", *options, sys.executable, *arguments]
    process = subprocess.Popen(
        command,
        env={**ENVIRONMENT, "OMP_NUM_THREADS": threads, **os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is for us, who then end it in order
    )
    assert process.stdout is not None  # it is a pipe
    lines: list[str] = []
    reader = threading.Thread(target=show, args=(process.stdout, lines), daemon=True)
    reader.start()
    returncode = 124
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            returncode = process.wait(limit_s)
    finally:
        end(process)
        reader.join(5)
    return Launched(returncode, "".join(lines))


def show(stream: IO[str], lines: list[str]) -> None:
    for line in stream:
        plain = TAG.sub("", line)
        lines.append(plain)
        if not CHAT.match(plain):
            print(plain, end="", flush=True)


def end(process: subprocess.Popen[str]) -> None:
    """With all that it has started: launchers end their ranks when they are asked to, mostly."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.kill()
    psutil.wait_procs(family, timeout=5)
    process.wait(5)
