"""Two real ranks that train for a second, with each framework over each of Horovod's backends."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator

from hvd_averaging.build_horovod.commands import which
from hvd_averaging.cli.findings import Finding, error, ok
from hvd_averaging.cli.probing import Ran, run
from hvd_averaging.cli.smoke_training import ANSWER, RANKS
from hvd_averaging.cli.survey import BACKENDS, FRAMEWORKS, Survey

# How a rank's last line begins: Python's for an exception, or `smoke_training`'s own.
_NAMED = re.compile(r"[\w.]+(Error|Exception): |hvd-averaging smoke: ")
_REMEDY = "the findings above may say why; by hand: {command}"


def smoke(survey: Survey, limit: float, on_start: Callable[[str], None]) -> Iterator[Finding]:
    """Train; each launch may take `limit` seconds. `on_start` is told of each before it begins."""
    backends = [name for name in ("gloo", "mpi") if survey.built(name)]
    if "mpi" in backends and shutil.which("mpirun") is None:
        backends.remove("mpi")  # `launching.check_mpirun` has said so
    horovodrun = which("horovodrun")
    if horovodrun is None or not backends:
        yield error("training", "not tried: there is nothing to train with", "put right what is said above")
        return
    for backend in backends:
        for framework in survey.trainable:
            about = f"training, {BACKENDS[backend]}"
            on_start(f"two ranks train with {FRAMEWORKS[framework]} over {BACKENDS[backend]}")
            yield _train(horovodrun, about, backend, framework, limit)


def _train(horovodrun: str, about: str, backend: str, framework: str, limit: float) -> Finding:
    training = [sys.executable, "-m", "hvd_averaging.cli.smoke_training", framework, backend, f"{limit:g}"]
    command = [horovodrun, "-np", str(RANKS), "--disable-cache", f"--{backend}", *training]
    ran = run(command, limit)
    result = _result(ran)
    if result is not None and ran.status == 0:
        return ok(about, f"{FRAMEWORKS[framework]}: {result}")
    why = f"did not end within {limit:g} seconds" if ran.timed_out else _reason(ran)
    return error(about, f"{FRAMEWORKS[framework]}: {why}", _REMEDY.format(command=" ".join(command)), lacks=backend)


def _result(ran: Ran) -> str | None:
    """What rank 0 told of its training, in words."""
    # Launchers put tags before a line.
    told = [line.partition(ANSWER)[2] for line in ran.output.splitlines() if ANSWER in line]
    if not told:
        return None
    facts = json.loads(told[-1])
    return "{ranks} ranks, {steps} steps, {rounds} rounds, loss {first:.3f} to {last:.3f}".format(**facts)


def _reason(ran: Ran) -> str:
    """The error that a rank named first, in a line that the launcher marks; else what was said last."""
    lines = [line.partition("<stderr>:")[2].strip() for line in (ran.output + "\n" + ran.said).splitlines()]
    named = [line for line in lines if _NAMED.match(line)]
    return named[0] if named else f"exit status {ran.status}: {ran.last_words}"
