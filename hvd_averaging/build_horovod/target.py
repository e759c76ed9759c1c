"""What a wheel is built for. Two machines with equal targets may share a wheel; everything else must not matter."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# The C++ standard that a framework's headers need, from which version on.
_CXX_STANDARDS = (
    ("torch", (2, 13), 20),
    ("torch", (2, 1), 17),
    ("tensorflow", (2, 10), 17),
)
_HOROVOD_CXX_STANDARD = 14


@dataclass(frozen=True)
class Part:
    """One thing that was looked for: `name` says in words what was found, None where it is not there or not wanted.

    `variables` tell Horovod's build about it.
    """

    name: str | None
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """Everything that decides what a compiled Horovod contains, in words that a person can read in `build.json`.

    None means "without". A version may carry more words, such as "2.21.0 (tensorflow-cpu)".
    """

    python: str
    platform: str
    compiler: str
    flags: str
    torch: str | None = None
    tensorflow: str | None = None
    mpi: str | None = None
    gpu: str | None = None

    def has(self, framework: str, at_least: tuple[int, int] = (0, 0)) -> bool:
        """Whether `framework` ("torch" or "tensorflow") is there in version `at_least` or newer."""
        version = getattr(self, framework)
        return version is not None and release(version) >= at_least

    @property
    def cxx_standard(self) -> int:
        """The newest C++ standard that any of the frameworks asks for; the older ones compile under it as well."""
        needed = (cxx for framework, since, cxx in _CXX_STANDARDS if self.has(framework, since))
        return max(needed, default=_HOROVOD_CXX_STANDARD)


def release(version: str) -> tuple[int, int]:
    """Major and minor number of a version: (2, 13) for "2.13.0+cpu"."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        raise ValueError(f"{version!r} does not start with a version number such as 2.13")
    return int(numbers[1]), int(numbers[2])
