"""Who takes part: the ranks of a Horovod process set, seen from this rank.

Knows Horovod's process sets, but no framework: the Horovod module of the framework in use is handed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import HorovodNotInitializedError, ProcessSetError


@dataclass(frozen=True)
class Members:
    """The ranks of a process set, in order, and this process's own rank (both numbered over the whole job)."""

    ranks: tuple[int, ...]
    rank: int
    process_set: Any

    @property
    def included(self) -> bool:
        return self.rank in self.ranks

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def alone(self) -> bool:
        """Whether this rank is the only one: then there is nobody to talk to."""
        return self.ranks == (self.rank,)

    @property
    def position(self) -> int:
        return self.ranks.index(self.rank)

    def __str__(self) -> str:
        return describe(self.ranks)


def describe(ranks: tuple[int, ...]) -> str:
    """How messages name a process set; long ones are shortened."""
    shown = ranks if len(ranks) <= 8 else (*ranks[:4], "...", ranks[-1])
    return "{" + ", ".join(map(str, shown)) + "}"


def members(process_set: Any, hvd: Any) -> Members:
    """The members of ``process_set``, or of Horovod's global set for ``None``.

    Args:
        process_set: a ``horovod.ProcessSet`` that was registered by ``hvd.init(process_sets=[...])`` or
            ``hvd.add_process_set``, or ``None``.
        hvd: ``horovod.torch`` or its like for another framework.

    Raises:
        HorovodNotInitializedError: ``hvd.init()`` was not called yet.
        ProcessSetError: the running Horovod does not know this set.
    """
    if not hvd.is_initialized():
        raise HorovodNotInitializedError(
            f"Horovod is not initialized: call `import {hvd.__name__} as hvd; hvd.init()` at the start of the "
            "script, and start it with `horovodrun -np 2 python train.py`."
        )
    if process_set is None or process_set.process_set_id == 0:
        return Members(tuple(range(hvd.size())), hvd.rank(), hvd.global_process_set)
    # The set remembers its number after hvd.shutdown(); only the running Horovod knows whether it still means this set.
    registered = hvd.mpi_ops._basics._get_process_set_ids_and_ranks()
    ranks = tuple(process_set.ranks or ())
    if len(ranks) == 1:
        return Members(ranks, hvd.rank(), process_set)  # needs no registration, as it never communicates
    if process_set.process_set_id is None or tuple(registered.get(process_set.process_set_id, ())) != ranks:
        raise ProcessSetError(
            f"The process set {describe(ranks)} is not registered with the running Horovod: it never was, or it went "
            "away with hvd.shutdown(). Register it on every rank, by hvd.init(process_sets=[...]) or "
            "hvd.add_process_set(...), and make a new averager with it."
        )
    return Members(ranks, hvd.rank(), process_set)


def check_process_set(process_set: Any) -> None:
    """Raise ``TypeError`` for what cannot be a Horovod process set."""
    if process_set is not None and not hasattr(process_set, "process_set_id"):
        raise TypeError(
            f"process_set must be a Horovod ProcessSet or None, not {type(process_set).__name__}. For ranks 0 and 1: "
            "`pair = hvd.ProcessSet([0, 1]); hvd.init(process_sets=[pair])`."
        )
