"""What a test asks for: the arguments of ``@pytest.mark.ranks``, and the worlds it is run in.

Knows nothing of processes or reports. Both the outer session and the ranks read markers through it, so that both see
the same test ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

BACKENDS = ("gloo", "mpi")
FRAMEWORKS = ("torch", "tensorflow")
DEFAULT_LIMIT_S = 30.0

# The argument through which a test is parametrised; its value is a `Place`.
PLACE = "ranks_place"


@dataclass(frozen=True)
class World:
    """One kind of launch. Tests of equal worlds share a launch."""

    framework: str
    np: int
    backend: str
    env: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        settings = "".join(f" {name}={value}" for name, value in self.env)
        return f"np={self.np} {self.backend} {self.framework}{settings}"


@dataclass(frozen=True)
class Place:
    """Where one test item runs, and for at most how many seconds."""

    world: World
    limit: float

    @property
    def id(self) -> str:
        return f"np{self.world.np}-{self.world.backend}"


def places(marker: pytest.Mark) -> list[Place]:
    """All places in which a test with this marker runs; ``ValueError`` or ``TypeError`` for a senseless marker."""
    return _places(*marker.args, **marker.kwargs)


def _places(
    *sizes: int,
    backends: Sequence[str] = BACKENDS,
    limit: float = DEFAULT_LIMIT_S,
    framework: str = "torch",
    env: Mapping[str, str] | None = None,
) -> list[Place]:
    if not sizes or not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise ValueError(f"ranks wants the numbers of ranks, such as ranks(2, 4), not {sizes}")
    if isinstance(backends, str) or not backends or not set(backends) <= set(BACKENDS):
        raise ValueError(f"backends wants a tuple out of {BACKENDS}, not {backends!r}")
    if framework not in FRAMEWORKS:
        raise ValueError(f"framework wants one of {FRAMEWORKS}, not {framework!r}")
    if limit <= 0:
        raise ValueError(f"limit wants a positive number of seconds, not {limit}")
    settings = tuple(sorted((env or {}).items()))
    return [Place(World(framework, size, backend, settings), limit) for size in sizes for backend in backends]


def place_of(item: pytest.Item) -> Place | None:
    """The place of a test that runs on ranks, ``None`` for an ordinary test."""
    callspec = getattr(item, "callspec", None)
    place = callspec.params.get(PLACE) if callspec else None
    return place if isinstance(place, Place) else None
