"""The compilation itself: the edited source in, a wheel out, everything it prints in a log file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hvd_averaging.build_horovod.commands import base_environment
from hvd_averaging.build_horovod.errors import BuildError, known_symptom, last_errors

# A framework's headers make one compiler take this much memory.
_BYTES_PER_JOB = 2 * 2**30


def default_jobs() -> int:
    """As many compilers at a time as there are processors, but no more than fit into memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // _BYTES_PER_JOB))


def compile_wheel(
    source: Path, into: Path, variables: Mapping[str, str], jobs: int, log: Path, on_line: Callable[[str], None]
) -> Path:
    """Build the wheel of the edited `source` into the folder `into`; each line of output goes to `on_line` as well.

    Raises:
        BuildError: the compilation failed; names the log and shows its last errors.
    """
    # Without a front end such as pip, which would hide the compiler's output and make an environment of its own.
    command = [sys.executable, "setup.py", "bdist_wheel", "--dist-dir", str(into)]
    environment = {**base_environment(), **variables, "MAKEFLAGS": f"-j{jobs}"}
    status = run_logged(command, source, environment, log, on_line)
    wheel = next(into.glob("*.whl"), None)
    if status == 0 and wheel is not None:
        return wheel
    output = log.read_text(errors="replace")
    problem, remedy = known_symptom(output) or (
        "Horovod did not compile",
        "read the log; if the compiler or a framework is newer than those this was made for, report it",
    )
    raise BuildError(f"{problem}\n{last_errors(output)}\n  log: {log}", remedy)


def run_logged(
    command: Sequence[str], cwd: Path, environment: Mapping[str, str], log: Path, on_line: Callable[[str], None]
) -> int:
    """Run `command` to its end, its output copied to `log` and `on_line`; returns its exit status.

    Whatever ends this function early, such as Ctrl-C, also ends the command and all that it started.
    """
    with (
        log.open("w", buffering=1, encoding="utf-8") as file,
        subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                on_line(line)
            return process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
