"""One call, no schedule: average now, start equal, check that replicas are equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .adapters import outside_autograph
from .agreement import Claim, agree
from .averagers import DEFAULT_TIMEOUT
from .channel import Channel
from .collect import Collected, collect_or_explain, restoring, reusable
from .companions import check_buffers
from .errors import list_of_ranks
from .header import Presence
from .layout import fingerprint
from .members import check_process_set, members
from .round import Round, Rounds


@outside_autograph
def average_parameters(
    params: object, process_set: Any = None, *, timeout: float | None = DEFAULT_TIMEOUT, buffers: str = "local"
) -> Round | None:
    """Average ``params`` over ``process_set`` now, in place.

    Args:
        params: as for :meth:`hvd_averaging.ModelAverager.average_parameters`; the same on every rank.
        process_set: a ``horovod.ProcessSet``; ``None`` is all ranks. A rank outside it does nothing.
        timeout: seconds to wait for the other ranks; ``None`` waits for ever.
        buffers: what becomes of the buffers if ``params`` is a model; see :class:`hvd_averaging.ModelAverager`.

    Returns:
        What the round did; ``None`` outside the process set.

    Raises:
        AveragingError, TypeError, ValueError: as the method of that name.
    """
    check_process_set(process_set)
    check_buffers(buffers)
    rounds = Rounds("average_parameters", process_set, timeout, buffers=buffers)
    met = rounds.run(params, step=0, settings="average_parameters")
    return None if met is None else met[0]


@contextmanager
def averaged(
    params: object, process_set: Any = None, *, timeout: float | None = DEFAULT_TIMEOUT, buffers: str = "local"
) -> Iterator[None]:
    """Inside the block ``params`` hold the mean, after it each rank's own values again, bit for bit.

    For evaluating the averaged model in mid-training, without disturbing the training::

        with averaged(model):
            accuracy = evaluate(model)

    All ranks of the process set enter together; leaving needs no communication, so an exception in the block, too,
    leaves every rank with its own values. Needs a copy of the parameters while it lasts.

    Args:
        params, process_set, timeout, buffers: as for :func:`average_parameters`.

    Raises:
        AveragingError, TypeError, ValueError: as :func:`average_parameters`.
    """
    params = reusable(params)
    check_buffers(buffers)
    with restoring(params, buffers):
        average_parameters(params, process_set, timeout=timeout, buffers=buffers)
        yield


@outside_autograph
def broadcast_parameters(
    params: object, root_rank: int = 0, process_set: Any = None, *, timeout: float | None = DEFAULT_TIMEOUT
) -> None:
    """Copy every tensor in ``params`` from ``root_rank`` to the other ranks, bit for bit, in place.

    Frozen and integer tensors are included, and for a model its buffers too: afterwards the replicas are equal.

    Args:
        params: as for :func:`average_parameters`; ``model.state_dict()`` works as well.
        root_rank: the rank, numbered over the whole job, whose values all take.
        process_set: a ``horovod.ProcessSet`` that ``root_rank`` belongs to; ``None`` is all ranks.
        timeout: seconds to wait for the other ranks; ``None`` waits for ever.

    Raises:
        ValueError: ``root_rank`` is not in the process set.
        AveragingError, TypeError: as :func:`average_parameters`.
    """
    talk = _meet("broadcast_parameters", f"broadcast_parameters(root_rank={root_rank})", params, process_set, timeout)
    if talk is None:
        return
    collected, channel = talk
    if root_rank not in channel.members.ranks:
        raise ValueError(f"{channel.where}: root_rank {root_rank!r} is not one of its ranks.")
    if channel.members.alone:
        return
    name = f"hvd_averaging.broadcast_parameters.{collected.layout.fingerprint:016x}"
    channel.complete(
        channel.begin(lambda: channel.adapter.broadcast(collected.tensors, name, root_rank, channel.members))
    )


@dataclass(frozen=True)
class ReplicaReport:
    """Whether replicas are equal; true in a condition if they are.

    Attributes:
        differences: for each tensor that differs, in order, its name and the ranks that differ from the first rank.
    """

    differences: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def equal(self) -> bool:
        return not self.differences

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        if self.equal:
            return "all replicas are bitwise equal"
        shown = "; ".join(f"{name!r} on {list_of_ranks(ranks)}" for name, ranks in self.differences[:5])
        more = "" if len(self.differences) <= 5 else f"; and {len(self.differences) - 5} more"
        return f"replicas differ: {shown}{more}"


@outside_autograph
def check_replicas(
    params: object, process_set: Any = None, *, timeout: float | None = DEFAULT_TIMEOUT
) -> ReplicaReport | None:
    """Whether all ranks hold bitwise equal values, and if not, which tensors differ where; the same on every rank.

    Ranks exchange a 63-bit hash of every tensor, not the tensors. Frozen and integer tensors count, and for a model
    its buffers too (which batch normalization changes on every rank differently): pass ``model.parameters()`` to
    leave those out.

    Args:
        params, process_set, timeout: as for :func:`average_parameters`.

    Returns:
        A report, true if all are equal; ``None`` outside the process set.

    Raises:
        AveragingError, TypeError, ValueError: as :func:`average_parameters`.
    """
    talk = _meet("check_replicas", "check_replicas", params, process_set, timeout)
    if talk is None:
        return None
    collected, channel = talk
    hashes = [fingerprint(channel.adapter.bytes_of(tensor)) for tensor in collected.tensors]
    rows = channel.gather(hashes, f"hashes.{len(hashes)}")
    reference = next(iter(rows.values()))
    differences = []
    for number, entry in enumerate(collected.layout.entries):
        ranks = tuple(rank for rank, row in rows.items() if row[number] != reference[number])
        if ranks:
            differences.append((entry.name, ranks))
    return ReplicaReport(tuple(differences))


def _meet(
    name: str, settings: str, params: object, process_set: Any, timeout: float | None
) -> tuple[Collected, Channel] | None:
    """Agree with the other ranks about what ``params`` are; ``None`` on a rank outside the process set."""
    check_process_set(process_set)
    collected, failure = collect_or_explain(params, everything=True)
    channel = Channel(collected.adapter, members(process_set, collected.adapter.hvd), name, timeout, call=name)
    if not channel.members.included:
        return None
    agree(Claim(0, Presence.AVERAGING, settings, collected.layout, failure), channel)
    return collected, channel
