"""One ``horovodrun``: start it, read what it says, and be sure that nothing of it is left.

Its processes live in several process groups and sessions, and outlive their parents when these are killed, so each
launch marks them all through their environment. Knows nothing of pytest.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

# Where Python finds this package before it has read any conftest, and what hides TensorFlow.
ROOT = Path(__file__).resolve().parents[__package__.count(".") + 1]
WITHOUT_TENSORFLOW = Path(__file__).resolve().with_name("without_tensorflow")

HOROVODRUN = Path(sys.executable).with_name("horovodrun")

# In the environment of every process of a launch: the launch's own id.
LAUNCH_ID = "RANKS_LAUNCH_ID"

# In the environment of the ranks of a launch only: by horovodrun (Gloo), by Open MPI.
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")

# How long a launcher may take to end once its ranks are dead, and how long it may then take to kill all that is left.
LAUNCHER_LIMIT_S = 10.0
KILL_LIMIT_S = 10.0

# horovodrun (Gloo), mpirun (a rank that exits), mpirun (a rank that is killed).
_EXIT_WORDS = (
    re.compile(r"^Process (?P<rank>\d+) exit with status code (?P<code>\d+)", re.M),
    re.compile(r"Process name: \[\[\d+,\d+\],(?P<rank>\d+)\]\s+Exit code:\s+(?P<code>\d+)"),
    re.compile(r"mpirun noticed that process rank (?P<rank>\d+) .* exited on signal (?P<signal>\d+)"),
)


@dataclass(frozen=True)
class Exit:
    """The first rank that ended badly, as the launcher tells it; a rank killed by signal n has code 128 + n."""

    rank: int
    code: int


# Put by the launchers before every piece that a rank writes, so that they may stand in the middle of a line.
_TAGS = re.compile(r"\[\d+(?:,\d+)?\]<std(?:out|err)>:")


@dataclass(frozen=True)
class Launched:
    """A launch that has ended. ``output`` is what all ranks and the launcher wrote, as it came, without tags."""

    returncode: int
    output: str
    seconds: float
    timed_out: bool


class Launch:
    """A running ``horovodrun``, whose output goes to a file."""

    def __init__(
        self, np: int, command: Sequence[str], backend: str, framework: str, env: Mapping[str, str], log: Path
    ) -> None:
        if LAUNCH_ID in os.environ:
            raise RuntimeError("a process of one launch must not start another: ranks would multiply")
        self.id = uuid.uuid4().hex
        self.log = log
        arguments = [str(HOROVODRUN), "-np", str(np), f"--{backend}", "--disable-cache", *command]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                arguments,
                env={**environment(framework), **env, LAUNCH_ID: self.id},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the outer session, which then ends its launches itself
            )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, limit: float) -> bool:
        """Wait at most ``limit`` seconds for the launcher to end; whether it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(limit)
        return self.process.poll() is not None

    def first_exit(self) -> Exit | None:
        words = self.output()
        for pattern in _EXIT_WORDS:
            if match := pattern.search(words):
                found = match.groupdict()
                return Exit(int(found["rank"]), int(found["code"]) if "code" in found else 128 + int(found["signal"]))
        return None

    def kill(self) -> None:
        """Kill every process of this launch, and wait until they are gone."""
        # The ranks first: a launcher that sees them die removes what they left in shared memory, and ends by itself.
        ranks = [process for process, env in self._processes() if not env.keys().isdisjoint(RANK_VARIABLES)]
        _kill(ranks)
        if ranks and self.wait(LAUNCHER_LIMIT_S):
            psutil.wait_procs(self._living(), timeout=1)  # such as the process that removes its semaphores
        deadline = time.monotonic() + KILL_LIMIT_S
        while (living := self._living()) and time.monotonic() < deadline:
            _kill(living)
            psutil.wait_procs(living, timeout=1)
        self.wait(1)

    def _living(self) -> list[psutil.Process]:
        return [process for process, _ in self._processes()]

    def _processes(self) -> Iterator[tuple[psutil.Process, Mapping[str, str]]]:
        for process in psutil.process_iter():
            # Processes of other users, zombies, and those which end just now are not ours.
            with contextlib.suppress(psutil.Error, OSError):
                env = process.environ()
                if env.get(LAUNCH_ID) == self.id:
                    yield process, env


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def environment(framework: str) -> dict[str, str]:
    """The environment of a launch: ours, made fit for more ranks than cores, for root, and for one framework."""
    defaults = {
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "2",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    # Options meant for the outer pytest (a JUnit file, -x) are not meant for each rank.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # Without its buffer Python writes a line in pieces, and those of several ranks mix in the launcher's output.
    inherited.pop("PYTHONUNBUFFERED", None)
    paths = [str(WITHOUT_TENSORFLOW)] if framework == "torch" else []
    paths += filter(None, [str(ROOT), inherited.get("PYTHONPATH")])
    return {**defaults, **inherited, "PYTHONPATH": os.pathsep.join(paths)}


def run_python(
    np: int,
    arguments: Sequence[str],
    log: Path,
    backend: str = "gloo",
    limit: float = 60.0,
    env: Mapping[str, str] | None = None,
    framework: str = "torch",
) -> Launched:
    """Run Python with these arguments to its end on ``np`` ranks, or kill it after ``limit`` seconds."""
    began = time.monotonic()
    launch = Launch(np, [sys.executable, *arguments], backend, framework, env or {}, log)
    try:
        ended = launch.wait(limit)
    finally:
        launch.kill()
    return Launched(
        launch.process.returncode, _TAGS.sub("", launch.output()), time.monotonic() - began, timed_out=not ended
    )


def lacks(backend: str, output: str) -> bool:
    """Whether a launch with this output failed because Horovod was built without the backend."""
    return "support has not been built" in output and not _is_built(backend)


@functools.cache
def _is_built(backend: str) -> bool:
    """Whether Horovod has this backend, by ``horovodrun --check-build``, which takes many seconds."""
    check = subprocess.run(
        [str(HOROVODRUN), "--check-build"],
        env=environment("tensorflow"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return says_built(check.stdout, backend)


def says_built(check_build: str, backend: str) -> bool:
    """Read what ``--check-build`` says of a controller. What it does not name counts as built: it is not skipped."""
    controllers = check_build.partition("Available Controllers:")[2].partition("Available")[0]
    return re.search(rf"\[ \] {backend}$", controllers, re.I | re.M) is None
