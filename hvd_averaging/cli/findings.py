"""One thing that was found, how bad it is, and what to do about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum


class Level(str, Enum):
    """How bad it is, from best to worst."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


# What `--need` knows: a finding that says one of them is lacking is then an error.
NEEDS = ("torch", "tensorflow", "keras", "gloo", "mpi", "nccl", "launch")


@dataclass(frozen=True)
class Finding:
    """`what` was found `about` something, and the `remedy` where there is one.

    `lacks` is the one of `NEEDS` that does not work because of it, or empty.
    """

    level: Level
    about: str
    what: str
    remedy: str = ""
    lacks: str = ""


def ok(about: str, what: str) -> Finding:
    """Something that is as it should be."""
    return Finding(Level.OK, about, what)


def note(about: str, what: str, remedy: str = "", lacks: str = "") -> Finding:
    """Something that one should know, and that many need not care about."""
    return Finding(Level.NOTE, about, what, remedy, lacks)


def warning(about: str, what: str, remedy: str, lacks: str = "") -> Finding:
    """Something that will hurt many, though training may well work."""
    return Finding(Level.WARNING, about, what, remedy, lacks)


def error(about: str, what: str, remedy: str, lacks: str = "") -> Finding:
    """Something that training cannot do without is broken."""
    return Finding(Level.ERROR, about, what, remedy, lacks)


def with_needs(findings: Iterable[Finding], needs: Collection[str]) -> list[Finding]:
    """The findings, those being errors that say that something in `needs` is lacking."""
    return [
        dataclasses.replace(finding, level=Level.ERROR) if finding.lacks in needs else finding for finding in findings
    ]


def is_broken(findings: Iterable[Finding]) -> bool:
    """Whether there is an error among them."""
    return any(finding.level is Level.ERROR for finding in findings)
