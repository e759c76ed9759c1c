"""Checks of other hosts: can horovodrun reach them, and do they have the same Python and the same versions as we do?"""

from __future__ import annotations

import json
import re
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hvd_averaging.cli.findings import Finding, error, ok, warning
from hvd_averaging.cli.probing import Ran, run
from hvd_averaging.cli.survey import installed_version

_SHAPE = re.compile(r"^(?P<name>[\w.-]+):(?P<slots>[1-9]\d*)$")
_LOCAL = ("localhost", "127.0.0.1", "::1")
# Like horovodrun's ssh, which asks no one and takes any host's key; but nothing is written down.
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null")
# What must be the same everywhere, by the names under which pip knows it.
_ALIKE = ("horovod", "torch", "keras", "hvd_averaging")
_ASK = (
    "import importlib.metadata as m, json\n"
    "def v(n):\n"
    "    try: return m.version(n)\n"
    "    except m.PackageNotFoundError: return None\n"
    f"print(json.dumps({{n: v(n) for n in {_ALIKE!r}}}))"
)


@dataclass(frozen=True)
class Host:
    """A host and how many ranks may run on it."""

    name: str
    slots: int

    @property
    def is_this(self) -> bool:
        """Whether it is the machine that we are on, which needs no ssh."""
        return self.name in (*_LOCAL, socket.gethostname(), socket.getfqdn())


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts in a text such as `a:2,b:2`, as horovodrun's `-H` takes it.

    Raises:
        ValueError: it has another shape.
    """
    matches = [(part, _SHAPE.match(part)) for part in text.split(",")]
    for part, match in matches:
        if match is None:
            raise ValueError(f"{part!r} is not a host with its number of ranks, such as worker-0:2")
    return tuple(Host(match["name"], int(match["slots"])) for _, match in matches if match)


def ranks_here(hosts: Sequence[Host], ranks: int | None) -> int | None:
    """How many of `ranks` will run here, since horovodrun fills the hosts in order; None where that is not known."""
    if not hosts:
        return ranks
    left, here = sum(host.slots for host in hosts) if ranks is None else ranks, 0
    for host in hosts:
        here += min(left, host.slots) if host.is_this else 0
        left -= min(left, host.slots)
    return here


def check_hosts(hosts: Sequence[Host], ranks: int | None, limit: float) -> Iterator[Finding]:
    """The places for the ranks, and every other host by ssh, all at the same time."""
    slots = sum(host.slots for host in hosts)
    if hosts and ranks and ranks > slots:
        yield error("hosts", f"{ranks} ranks, and {slots} places for them in -H", "name more hosts, or more per host")
    others = [host.name for host in hosts if not host.is_this]
    if not others:
        return
    ours = {name: installed_version(name) for name in _ALIKE}
    with ThreadPoolExecutor(len(others)) as pool:
        answers = pool.map(lambda name: _ask(name, limit), others)
    for name, ran in zip(others, answers, strict=True):
        yield _host(name, ran, ours)


def _ask(name: str, limit: float) -> Ran:
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(_ASK)}"
    return run([*_SSH, "-o", f"ConnectTimeout={max(1, int(limit))}", name, command], limit)


def _host(name: str, ran: Ran, ours: Mapping[str, str | None]) -> Finding:
    about = f"host {name}"
    if ran.status is None or ran.status == 255:  # ssh's own failures
        why = "no answer in time" if ran.timed_out else ran.last_words
        remedy = f"make `ssh -o BatchMode=yes {name} true` work: a key without a question, a known address"
        return error(about, f"ssh does not get there: {why}", remedy)
    if ran.status != 0:
        remedy = "install the same environment under the same path on every host"
        return error(about, f"has no {sys.executable}: {ran.last_words}", remedy)
    theirs = json.loads(ran.output.splitlines()[-1])
    differing = [f"{part} {theirs[part]} (here {ours[part]})" for part in _ALIKE if theirs[part] != ours[part]]
    if differing:
        return warning(about, f"has {', '.join(differing)}", "install the same versions on every host")
    return ok(about, "can be reached and has the same versions")
