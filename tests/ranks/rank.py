"""One rank: a pytest session that runs the tests which the outer session names, and answers each with its reports.

Run by ``horovodrun`` as ``python -m ranks``. The outer session names the next test only after all ranks have
answered for the last one, so tests never overlap, without any collective of our own that could disturb theirs.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import pytest

# Asks a rank for the stacks of its threads. Not SIGUSR1, which tests of preemption like to use.
STACKS_SIGNAL = signal.SIGUSR2

# A rank ends itself this long after a test's limit, in case the outer session is no longer there to do it.
ORPHAN_MARGIN_S = 30.0


def own_log(directory: Path, pid: int) -> Path:
    """Where a rank writes its standard output and error."""
    return directory / f"{pid}.log"


def own_stacks(directory: Path, pid: int) -> Path:
    """Where a rank writes its stacks when it is asked for them."""
    return directory / f"{pid}.stacks"


class RankSession:
    """The plugin that replaces a rank's test loop."""

    def __init__(self, directory: Path, framework: str) -> None:
        self.directory = directory
        self.framework = framework
        self.rank = -1
        self.size = 0
        self.shared_path = directory
        self._reports: list[pytest.TestReport] = []
        self._stacks = own_stacks(directory, os.getpid()).open("w")
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed:
            return None  # pytest's own loop tells which files could not be imported
        # What a rank writes goes into the outer report; a terminal reporter's dots do not belong there.
        session.config.pluginmanager.unregister(name="terminalreporter")
        hvd = importlib.import_module(f"horovod.{self.framework}")
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()
        with Client(str(self.directory / "socket"), family="AF_UNIX") as outer:
            backend = "mpi" if hvd.mpi_enabled() else "gloo"
            _send(outer, {"rank": self.rank, "size": self.size, "pid": os.getpid(), "backend": backend})
            self._serve(session, outer)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def _serve(self, session: pytest.Session, outer: Connection) -> None:
        items = {item.nodeid: item for item in session.items}
        while (request := _receive(outer)) is not None:
            _send(outer, self._run(items, request))

    def _run(self, items: Mapping[str, pytest.Item], request: Mapping[str, Any]) -> list[dict[str, Any]]:
        item = items[request["test"]]
        self.shared_path = self.directory / f"shared-{request['number']}"
        self._reports = []
        faulthandler.dump_traceback_later(request["limit"] + ORPHAN_MARGIN_S, exit=True, file=self._stacks)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=items.get(request["next"]))
        faulthandler.cancel_dump_traceback_later()
        hook = item.config.hook
        return [hook.pytest_report_to_serializable(config=item.config, report=report) for report in self._reports]


def _send(outer: Connection, message: object) -> None:
    outer.send_bytes(json.dumps(message, default=str).encode())


def _receive(outer: Connection) -> dict[str, Any] | None:
    """The next request, or ``None`` when the outer session wants no more, or is gone."""
    try:
        request: dict[str, Any] = json.loads(outer.recv_bytes())
    except (EOFError, ConnectionError):
        return None
    return request


def _write_to_own_log(directory: Path) -> None:
    """Send what this process writes, from Python or C, to a file of its own, which survives it however it ends."""
    log = os.open(own_log(directory, os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="ranks")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--framework", required=True)
    options, pytest_arguments = parser.parse_known_args(arguments)
    _write_to_own_log(options.directory)
    # Uncaptured, because what a dying rank had written would die with pytest's capture.
    own = ["--capture=no", f"--basetemp={options.directory}/tmp-{os.getpid()}", "-p", "no:cacheprovider"]
    return pytest.main([*own, *pytest_arguments], plugins=[RankSession(options.directory, options.framework)])
