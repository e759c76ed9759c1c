"""The outer session's end of one launch: start the ranks, have them run one test at a time, and see how each fares."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .launch import Launch
from .rank import STACKS_SIGNAL, own_log, own_stacks
from .world import World

# From starting horovodrun until all ranks have imported everything and initialised Horovod.
START_LIMIT_S = 90.0

# Once a test has failed on one rank, how long the others get to answer as well (most failures are on all ranks).
GRACE_S = 2.0

# How long a launcher may take to tell how a rank ended, and ranks to write their stacks.
EXIT_WORDS_LIMIT_S = 3.0
STACKS_LIMIT_S = 2.0
OUTPUT_LIMIT = 20_000  # characters of each rank's output that a report shows, from the end

Report = dict[str, Any]  # as pytest serialises it


class StartError(Exception):
    """The ranks did not start; ``said`` is what they and their launcher wrote."""

    def __init__(self, headline: str, said: str) -> None:
        super().__init__(headline)
        self.headline = headline
        self.said = said


class State(Enum):
    ANSWERED = "answered"
    DIED = "died"
    OUTLIVED = "outlived the limit"
    UNFINISHED = "had not finished when the launch was ended"


@dataclass
class Outcome:
    """How one rank fared in one test."""

    rank: int
    state: State = State.UNFINISHED
    reports: list[Report] = field(default_factory=list)
    exit_code: int | None = None
    output: str = ""
    stacks: str = ""

    @property
    def sound(self) -> bool:
        """Whether the rank got through the test, so that its collectives are still in step with the other ranks'."""
        return self.state is State.ANSWERED and not any(
            report["outcome"] == "failed" or "wasxfail" in report for report in self.reports
        )

    @property
    def skipped(self) -> bool:
        return any(report["outcome"] == "skipped" and "wasxfail" not in report for report in self.reports)


class Log:
    """A file that others write, read bit by bit."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def news(self) -> str:
        """What has been written since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        self._read += len(text)
        return _tail(text.decode(errors="replace"))


@dataclass
class Member:
    """A started rank: the connection over which it takes requests, and the files that it writes."""

    rank: int
    pid: int
    connection: Connection
    log: Log
    stacks_path: Path

    def ask_for_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, STACKS_SIGNAL)

    def stacks(self) -> str:
        return self.stacks_path.read_text(errors="replace")


class Team:
    """All ranks of one launch, to be met before they run anything. Once a test has gone wrong, the team is over."""

    def __init__(self, world: World, pytest_arguments: Sequence[str]) -> None:
        self.world = world
        self.over = False
        self._number = 0
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._launch_log = Log(self._directory / "launch.log")
        self._members: list[Member] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._directory / "socket"))
        self._listener.listen(world.np)
        self._listener.settimeout(0.1)
        own = ["--directory", str(self._directory), "--framework", world.framework]
        command = [sys.executable, "-m", __package__, *own, *pytest_arguments]
        # Each rank writes to a log of its own, which must hold everything when the rank is killed.
        env = {"PYTHONUNBUFFERED": "1", **dict(world.env)}
        self._launch = Launch(world.np, command, world.backend, world.framework, env, self._launch_log.path)

    def meet(self) -> None:
        """Wait until all ranks are there, which raises ``StartError`` and closes the team if they do not come."""
        try:
            deadline = time.monotonic() + START_LIMIT_S
            while len(self._members) < self.world.np:
                if time.monotonic() > deadline:
                    raise self._start_error(f"not all ranks were there after {START_LIMIT_S:.0f} s")
                if self._launch.process.poll() is not None:
                    raise self._start_error(f"the launch ended with exit code {self._launch.process.returncode}")
                with contextlib.suppress(TimeoutError):
                    self._welcome(Connection(self._listener.accept()[0].detach()))
        except BaseException:
            self.close()
            raise

    def run(self, test: str, following: str | None, limit: float) -> list[Outcome]:
        """Run one test on all ranks. ``following`` is the test that comes next, if it is known to run on this team."""
        self.over = True  # until all ranks have got through; an interrupt leaves it so
        self._number += 1
        for log in [self._launch_log, *(member.log for member in self._members)]:
            log.news()
        outcomes = self._answers({"test": test, "next": following, "limit": limit, "number": self._number}, limit)
        if any(outcome.state is State.DIED for outcome in outcomes.values()):
            self._tell_who_died_first(outcomes)
        if any(outcome.state is State.OUTLIVED for outcome in outcomes.values()):
            self._collect_stacks(outcomes)
        agreed = len({outcome.skipped for outcome in outcomes.values()}) == 1
        if agreed and all(outcome.sound for outcome in outcomes.values()):
            self.over = False
        for member in self._members:
            outcomes[member.rank].output = member.log.news()
        return [outcomes[rank] for rank in sorted(outcomes)]

    def launcher_news(self) -> str:
        """What the launcher has written since the last test began."""
        return self._launch_log.news()

    def close(self) -> None:
        """End the ranks, by force: the tests are over, and to shut down Horovod and MPI in order takes seconds."""
        self.over = True
        self._launch.kill()
        self._listener.close()
        for member in self._members:
            member.connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _welcome(self, connection: Connection) -> None:
        try:
            hello = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise self._start_error("a rank died as soon as it was there") from None
        if hello["size"] != self.world.np or hello["backend"] != self.world.backend:
            raise self._start_error(f"Horovod started something else: {hello}")
        paths = own_log(self._directory, hello["pid"]), own_stacks(self._directory, hello["pid"])
        self._members.append(Member(hello["rank"], hello["pid"], connection, Log(paths[0]), paths[1]))

    def _start_error(self, reason: str) -> StartError:
        logs = [self._launch_log.path, *sorted(self._directory.glob("*.log"))]
        texts = {path.stem: _tail(path.read_text(errors="replace")) for path in logs}
        said = "\n".join(f"--- {name} ---\n{text}" for name, text in texts.items() if text.strip())
        return StartError(f"{self.world} did not start: {reason}", said)

    def _answers(self, request: Mapping[str, Any], limit: float) -> dict[int, Outcome]:
        """Send the request, and wait for all answers, or for the first sign of trouble and a little longer."""
        outcomes = {member.rank: Outcome(member.rank) for member in self._members}
        waiting = {member.connection: outcomes[member.rank] for member in self._members}
        deadline = time.monotonic() + limit
        for connection in waiting:
            with contextlib.suppress(ConnectionError):  # a rank that died just before shows when its answer is read
                connection.send_bytes(json.dumps(request).encode())
        in_trouble = False
        while waiting and (ready := _readable(waiting, deadline)):
            for connection in ready:
                outcome = waiting.pop(connection)
                _read_answer(connection, outcome)
                if not outcome.sound and not in_trouble:
                    in_trouble = True
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if not in_trouble:
            for outcome in waiting.values():
                outcome.state = State.OUTLIVED
        return outcomes

    def _tell_who_died_first(self, outcomes: Mapping[int, Outcome]) -> None:
        """A launcher ends the other ranks when one dies; only its words tell which was the first, and how it ended."""
        deadline = time.monotonic() + EXIT_WORDS_LIMIT_S
        while (first := self._launch.first_exit()) is None and time.monotonic() < deadline:
            if self._launch.wait(0.05):
                first = self._launch.first_exit()
                break
        if first is None or first.rank not in outcomes:
            return
        for outcome in outcomes.values():
            if outcome.state is State.DIED:
                outcome.state = State.UNFINISHED
        outcomes[first.rank].state = State.DIED
        outcomes[first.rank].exit_code = first.code

    def _collect_stacks(self, outcomes: Mapping[int, Outcome]) -> None:
        stuck = [member for member in self._members if outcomes[member.rank].state is State.OUTLIVED]
        for member in stuck:
            member.ask_for_stacks()
        _wait_until_written(stuck)
        for member in stuck:
            outcomes[member.rank].stacks = member.stacks()


def _readable(connections: Iterable[Connection], deadline: float) -> list[Connection]:
    ready = wait(list(connections), max(0.0, deadline - time.monotonic()))
    return [connection for connection in connections if connection in ready]


def _read_answer(connection: Connection, outcome: Outcome) -> None:
    try:
        outcome.reports = json.loads(connection.recv_bytes())
        outcome.state = State.ANSWERED
    except (EOFError, ConnectionError):
        outcome.state = State.DIED


def _wait_until_written(members: Iterable[Member]) -> None:
    """Wait until the stacks of all members are there and no longer grow; a rank may be unable to write them."""
    deadline = time.monotonic() + STACKS_LIMIT_S
    sizes: list[int] = []
    while time.monotonic() < deadline:
        before, sizes = sizes, [len(member.stacks()) for member in members]
        if all(sizes) and sizes == before:
            return
        time.sleep(0.1)


def _tail(text: str) -> str:
    return text if len(text) <= OUTPUT_LIMIT else f"[... {len(text) - OUTPUT_LIMIT} characters]\n{text[-OUTPUT_LIMIT:]}"
