"""All that the checks look at, gathered once. Checks are functions from it to findings and touch nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from hvd_averaging.cli.probing import Probed, probe_all

FRAMEWORKS = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
BACKENDS = {"gloo": "Gloo", "mpi": "MPI", "nccl": "NCCL"}


@dataclass(frozen=True)
class Survey:
    """What is installed and how this process was started.

    `horovod` is Horovod's version, None where there is none; `compiled_for` says for which versions of the frameworks
    (keys "torch", "tensorflow") it was compiled, as far as it tells.
    """

    parts: Mapping[str, Probed]
    horovod: str | None
    compiled_for: Mapping[str, str]
    variables: Mapping[str, str]
    cores: int

    @property
    def trainable(self) -> list[str]:
        """The frameworks that work together with Horovod."""
        return [name for name in FRAMEWORKS if self.parts[name].works and self.parts[f"horovod.{name}"].works]

    def built(self, backend: str) -> bool:
        """Whether any working half of Horovod has this one of `BACKENDS`."""
        return any(self.parts[f"horovod.{name}"].facts[backend] for name in self.trainable)

    @property
    def gpus(self) -> int:
        """How many GPUs a framework sees."""
        return max(int(self.parts[name].facts.get("gpus", 0)) for name in FRAMEWORKS)


def take(limit: float) -> Survey:
    """Look around; each process that imports something may take `limit` seconds."""
    return Survey(
        parts=probe_all(limit),
        horovod=_horovod_version(),
        compiled_for=_compiled_for(),
        variables=dict(os.environ),
        cores=len(os.sched_getaffinity(0)),
    )


def _horovod_version() -> str | None:
    return (installed_version("horovod") or "of unknown version") if find_spec("horovod") else None


def installed_version(distribution: str) -> str | None:
    """The version of a distribution, by the name that pip knows; None where pip knows nothing of it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _compiled_for() -> dict[str, str]:
    """What Horovod noted when it was compiled: a file with a line for each framework that was there."""
    spec = find_spec("horovod")
    noted = Path(spec.origin).with_name("metadata.json") if spec and spec.origin else None
    if noted is None or not noted.is_file():
        return {}
    names = {"pytorch": "torch", "tensorflow": "tensorflow"}
    versions = json.loads(noted.read_text(encoding="utf-8"))
    return {ours: versions[theirs] for theirs, ours in names.items() if theirs in versions}
