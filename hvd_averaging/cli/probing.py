"""What is installed, as `probe` sees it from other processes; and how any program is run: never without an end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

# What shares a process: Horovod's half for a framework loads that framework anyway, and so does Keras.
_PROCESSES = (("torch", "horovod.torch"), ("tensorflow", "keras", "horovod.tensorflow"))
# How long a program may take to end by itself after it was asked to.
_GRACE_S = 5.0


@dataclass(frozen=True)
class Ran:
    """A program that has ended: `status` is its exit status, None where it ran out of time or was not found."""

    status: int | None
    output: str
    said: str  # on standard error
    timed_out: bool = False

    @property
    def last_words(self) -> str:
        """The last line that it wrote, in the hope that it says why."""
        lines = [line.strip() for line in (self.output + "\n" + self.said).splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"


def run(command: Sequence[str], limit: float, env: Mapping[str, str] | None = None) -> Ran:
    """Run `command`, and end it after `limit` seconds, or when the doctor itself is interrupted."""
    # Files instead of pipes: a grandchild that outlives its parent would keep a pipe, and us, open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
            )
        except OSError as problem:
            return Ran(None, "", str(problem))
        timed_out = False
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _end(process)
        for file in (output, errors):
            file.seek(0)
        said = [file.read().decode(errors="replace") for file in (output, errors)]
        return Ran(None if timed_out else process.returncode, said[0], said[1], timed_out)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program that still runs, and all of its group, politely first: launchers then end their ranks."""
    if process.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):  # the whole group is gone
            os.killpg(process.pid, number)
            deadline = time.monotonic() + _GRACE_S
            while time.monotonic() < deadline:
                process.poll()  # or it would stay in its group, as a zombie
                os.killpg(process.pid, 0)
                time.sleep(0.02)


class State(str, Enum):
    """How a part is."""

    WORKS = "works"
    MISSING = "missing"
    UNBUILT = "unbuilt"  # a half of Horovod that was left out when Horovod was compiled
    BROKEN = "broken"
    UNSEEN = "unseen"  # something before it in the same process broke


@dataclass(frozen=True)
class Probed:
    """What is known of a part: `facts` where it works, what it `said` where it does not."""

    state: State
    facts: Mapping[str, Any] = field(default_factory=dict)
    said: str = ""

    @property
    def works(self) -> bool:
        """Whether it can be imported."""
        return self.state is State.WORKS


def probe_all(limit: float) -> dict[str, Probed]:
    """Every part, by its module's name; each process may take `limit` seconds."""
    with ThreadPoolExecutor(len(_PROCESSES)) as pool:
        seen = pool.map(lambda parts: _probe(parts, limit), _PROCESSES)
        return {part: probed for answers in seen for part, probed in answers.items()}


def _probe(parts: Sequence[str], limit: float) -> dict[str, Probed]:
    ran = run([sys.executable, "-m", "hvd_averaging.cli.probe", *parts], limit)
    seen = dict.fromkeys(parts, Probed(State.UNSEEN))
    for line in ran.output.splitlines():
        answer = json.loads(line)
        if answer["state"] == "begun":
            seen[answer["part"]] = Probed(State.BROKEN, said=_why(ran, limit))  # unless a second line follows
        else:
            seen[answer["part"]] = Probed(State(answer["state"]), answer.get("facts", {}), answer.get("said", ""))
    return seen


def _why(ran: Ran, limit: float) -> str:
    """Why a probe ended in the middle of an import."""
    if ran.timed_out:
        return f"its import did not end within {limit:g} seconds"
    if ran.status is not None and ran.status < 0:
        return f"its import crashed with {signal.Signals(-ran.status).name}"
    return f"its import ended Python: {ran.last_words}"
