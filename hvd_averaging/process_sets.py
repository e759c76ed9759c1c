"""Who averages with whom: the Horovod process sets that averaging needs, found or made on every rank alike.

Every function here is called by all ranks together, after ``hvd.init()``, and returns the set that *this* rank belongs
to. A set that exists already (made in ``hvd.init(process_sets=[...])``, say) is used again. The set of all ranks is
Horovod's global one; a set of one rank needs no communication and is not registered.

Horovod must know process sets: either list them, ``hvd.init(process_sets=[hvd.ProcessSet(r) for r in plan(8, [2])])``,
or allow them to be added later, ``hvd.init(process_sets="dynamic")`` or ``HOROVOD_DYNAMIC_PROCESS_SETS=1``.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
from collections.abc import Iterable, Sequence
from typing import Any

from .adapters import Adapter, initialized_adapter
from .channel import Channel
from .errors import HorovodNotInitializedError, ProcessSetError, list_of_ranks
from .layout import fingerprint
from .members import describe, members

Ranks = tuple[int, ...]

_TIMEOUT = 120.0  # seconds for the ranks to tell each other their hosts, once, at the start


def plan(size: int, sizes: Sequence[int]) -> list[list[int]]:
    """The ranks of every process set that groups of these sizes need, for listing them in ``hvd.init``.

    Args:
        size: the number of ranks of the job; before ``hvd.init`` it is in the environment, as
            ``HOROVOD_SIZE`` (Gloo) or ``OMPI_COMM_WORLD_SIZE`` (Open MPI).
        sizes: of the groups, each dividing ``size``. Groups of one and of all ranks need no set.

    Raises:
        ValueError: a size that does not divide ``size``.

    Example::

        >>> plan(8, [2, 4, 8])
        [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1, 2, 3], [4, 5, 6, 7]]
    """
    everyone = range(size)
    return [list(group) for each in sizes if 1 < each < size for group in _cut(everyone, each)]


def by_size(size: int, within: Any = None) -> Any:
    """The group of ``size`` neighbouring ranks that this rank is in.

    Args:
        size: of every group; it must divide the number of ranks.
        within: the enclosing process set; ``None`` is all ranks. A rank outside it gets a set without itself.

    Raises:
        ValueError: on all ranks, if ``size`` does not divide the number of ranks; names the ranks left over.
        ProcessSetError: Horovod knows no such sets and may not add them.
    """
    adapter = initialized()
    enclosing = members(within, adapter.hvd)
    return _register(adapter, _cut(enclosing.ranks, size))


def hierarchy(sizes: Sequence[int], within: Any = None) -> list[Any]:
    """One set per level, from the smallest groups to the largest: ``hierarchy([2, 8])``.

    Args:
        sizes: strictly increasing, each dividing the next.
        within: as for :func:`by_size`.

    Raises:
        ValueError: sizes that do not increase, or do not divide the next level or the number of ranks.
        ProcessSetError: as for :func:`by_size`.
    """
    for smaller, larger in itertools.pairwise(sizes):
        if smaller >= larger or larger % smaller:
            raise ValueError(f"Every level must be made of whole groups of the one below; {smaller}, {larger} are not.")
    return [by_size(size, within) for size in sizes]


def of(ranks: Iterable[int]) -> Any:
    """The set of exactly these ranks, on every rank (also on those outside it, where averaging does nothing).

    Raises:
        ValueError: no ranks, the same twice, or ranks that the job does not have.
        ProcessSetError: as for :func:`by_size`.
    """
    adapter = initialized()
    wanted, size = tuple(sorted(ranks)), adapter.hvd.size()
    if not wanted or len(set(wanted)) < len(wanted) or wanted[0] < 0 or wanted[-1] >= size:
        raise ValueError(f"A process set is of different ranks from 0 to {size - 1}; {list(wanted)} is not.")
    return _register(adapter, [wanted])


def by_node(within: Any = None) -> Any:
    """The ranks on this rank's host.

    Args:
        within: as for :func:`by_size`.

    Raises:
        ProcessSetError: as for :func:`by_size`.
    """
    adapter = initialized()
    return _register(adapter, _nodes(adapter, within))


def across_nodes(within: Any = None) -> Any:
    """One rank of every host: those with this rank's position on its host.

    Args:
        within: as for :func:`by_size`.

    Raises:
        ValueError: on all ranks, if hosts have different numbers of ranks; names them.
        ProcessSetError: as for :func:`by_size`.
    """
    adapter = initialized()
    nodes = _nodes(adapter, within)
    if len({len(node) for node in nodes}) > 1:
        counts = "; ".join(f"{len(node)} on the host of {list_of_ranks(node)}" for node in nodes)
        raise ValueError(f"Hosts have different numbers of ranks, so some would have no partner: {counts}.")
    return _register(adapter, list(zip(*nodes, strict=True)))


def initialized() -> Adapter:
    """The adapter of the framework whose Horovod is up.

    Raises:
        HorovodNotInitializedError: there is none.
    """
    adapter = initialized_adapter()
    if adapter is None:
        raise HorovodNotInitializedError(
            "Process sets are made after hvd.init(): `import horovod.torch as hvd; hvd.init(process_sets='dynamic')`."
        )
    return adapter


def _cut(ranks: Sequence[int], size: int) -> list[Ranks]:
    if size < 1:
        raise ValueError(f"A group has at least one rank; {size} is none.")
    left_over = ranks[len(ranks) // size * size :]
    if left_over:
        raise ValueError(
            f"{len(ranks)} ranks cannot be cut into groups of {size}: {list_of_ranks(left_over)} would be left over."
        )
    return [tuple(ranks[start : start + size]) for start in range(0, len(ranks), size)]


def _nodes(adapter: Adapter, within: Any) -> list[Ranks]:
    """The ranks of every host, as far as they are ``within``, in order. All ranks compare the names of their hosts."""
    enclosing = members(within, adapter.hvd)
    channel = Channel(adapter, members(None, adapter.hvd), "process_sets", _TIMEOUT, call="by_node and across_nodes")
    hosts = channel.gather([fingerprint(socket.gethostname())], "hosts")
    nodes: dict[int, list[int]] = {}
    for rank, (host,) in hosts.items():
        if rank in enclosing.ranks:
            nodes.setdefault(host, []).append(rank)
    return [tuple(ranks) for ranks in nodes.values()]


def _register(adapter: Adapter, groups: Sequence[Ranks]) -> Any:
    """All groups, on every rank in the same order, as Horovod wants it; returns the one of this rank, or the last."""
    hvd = adapter.hvd
    sets = [_find_or_add(hvd, ranks) for ranks in groups]
    return next((found for found, ranks in zip(sets, groups, strict=True) if hvd.rank() in ranks), sets[-1])


def _find_or_add(hvd: Any, ranks: Ranks) -> Any:
    if len(ranks) == hvd.size():
        return hvd.global_process_set
    if len(ranks) == 1:
        return hvd.ProcessSet(list(ranks))
    known = {tuple(known): number for number, known in hvd.mpi_ops._basics._get_process_set_ids_and_ranks().items()}
    if ranks in known:
        found = hvd.ProcessSet(list(ranks))
        found.process_set_id = known[ranks]
        return found
    if not read_switch(os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0")):
        raise ProcessSetError(
            f"Horovod knows no process set {describe(ranks)} and may not add one. Either list the sets at the start, "
            "hvd.init(process_sets=[hvd.ProcessSet(ranks) for ranks in hvd_averaging.process_sets.plan(size, sizes)]), "
            'or allow adding them, hvd.init(process_sets="dynamic") or HOROVOD_DYNAMIC_PROCESS_SETS=1.'
        )
    return hvd.add_process_set(list(ranks))


def read_switch(value: str) -> bool | None:
    """Whether Horovod takes this value of an environment variable for a yes.

    It reads a number; what is none, such as ``true``, is off as well, but hardly meant so: ``None``.
    """
    number = re.match(r"\s*[+-]?\d+", value)
    return None if number is None else int(number[0]) > 0
