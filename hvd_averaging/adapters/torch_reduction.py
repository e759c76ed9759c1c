"""PyTorch: parameters are packed into flat buckets, which Horovod reduces in place.

Flat, because of how Horovod treats a list of tensors: it checks only the first one for contiguity (a transposed tensor
later in the list is silently permuted), keeps only the last one's status, caches only 1024 names, and counts elements
in 32 bits. Buckets also hold what 16-bit floats need: sums are formed in float32.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .. import header as headers
from ..layout import Bucket
from ..members import Members
from . import Pending, Terms

_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3  # seconds; Horovod itself looks once per cycle, of 1 ms by default
_LONGEST_FIRST_PAUSE = 0.05  # seconds; more would gain little, and cost much after rounds that a slow rank held up
_SMALL = 4096  # elements: to divide a tensor by itself takes longer than to divide so many more in one go
WIRE = {"float32": torch.float32, "float64": torch.float64}


class Polled:
    """Horovod wakes nobody up when a collective is done: one has to ask, and cannot stop waiting otherwise."""

    _hvd: Any
    _handles: Sequence[int]

    _moved_by_asking = False  # whether `done` does work, such as sending what comes next: then it must be asked often
    _waits: tuple[float, ...] = ()  # the last ones, in seconds; 0 where the first pause was enough, or too much

    def done(self) -> bool:
        return all(self._hvd.poll(handle) for handle in self._handles)

    def wait(self, timeout: float | None) -> bool:
        started, naps = time.monotonic(), 0
        pauses = self._pauses()
        while not self.done():
            if timeout is not None and time.monotonic() - started > timeout:
                return False
            time.sleep(next(pauses))  # leaves the core to the thread that does the work
            naps += 1
        self._waits = (*self._waits[-3:], time.monotonic() - started if naps > 1 else 0)
        return True

    def _pauses(self) -> Iterator[float]:
        """First most of what the shortest of the last waits took, so that pauses are short when the collective ends."""
        if not self._moved_by_asking and self._waits:
            yield min(0.75 * min(self._waits), _LONGEST_FIRST_PAUSE)
        pause = _SHORTEST_PAUSE
        while True:
            yield pause
            pause = min(1.2 * pause, _LONGEST_PAUSE)


class HeaderSum(Polled):
    """A collective of headers alone, for when ranks make sure of each other before they send anything else."""

    def __init__(self, hvd: Any, name: str, members: Members) -> None:
        self._hvd, self._name, self._members = hvd, name, members
        self._header = torch.empty(headers.LENGTH, dtype=torch.float32)

    def start(self, header: Sequence[float]) -> Pending:
        self._header.copy_(torch.tensor(header))
        self._handles = [
            self._hvd.grouped_allreduce_async_(
                [self._header], name=self._name, op=self._hvd.Sum, process_set=self._members.process_set
            )
        ]
        return self

    def result(self) -> list[float]:
        for handle in self._handles:
            self._hvd.synchronize(handle)
        sums: list[float] = self._header.tolist()
        return sums


class TorchReduction(Polled):
    """Flat buffers, which Horovod sums in place."""

    overwrites = False
    history = 0

    def __init__(
        self, hvd: Any, buckets: Sequence[Bucket], tensors: Sequence[torch.Tensor], name: str, members: Members
    ) -> None:
        self._hvd, self._buckets, self._members = hvd, buckets, members
        self._names = [f"{name}.{number}of{len(buckets)}" for number in range(1, len(buckets) + 1)]
        self._flat = [
            torch.empty(bucket.elements + headers.LENGTH, dtype=WIRE[bucket.dtype], device=device_of(bucket, tensors))
            for bucket in buckets
        ]
        self._views = [
            view for flat, bucket in zip(self._flat, buckets, strict=True) for view in views_of(bucket, flat)
        ]
        self._handles = []

    @torch.no_grad()
    def start(self, tensors: Sequence[torch.Tensor] | None, header: Sequence[float]) -> Pending:
        if tensors is None:
            for flat in self._flat:
                flat.zero_()
        elif self._views:
            torch._foreach_copy_(self._views, self._pieces(tensors))
        for flat in self._flat:
            flat[-headers.LENGTH :] = torch.tensor(header, dtype=flat.dtype)
        self._handles = [self._sum(number) for number in range(len(self._flat))]
        return self

    def _sum(self, bucket: int) -> int:
        # One group per bucket: Horovod keeps only one status per group, which would hide an earlier bucket's error.
        handle: int = self._hvd.grouped_allreduce_async_(
            [self._flat[bucket]], name=self._names[bucket], op=self._hvd.Sum, process_set=self._members.process_set
        )
        return handle

    def result(self) -> list[float]:
        for handle in self._handles:
            self._hvd.synchronize(handle)
        sums: list[float] = self._flat[-1][-headers.LENGTH :].tolist()
        return sums

    @torch.no_grad()
    def write(self, tensors: Sequence[torch.Tensor], contributors: int) -> None:
        write_means(self._flat, self._views, self._pieces(tensors), contributors)

    @property
    def bytes(self) -> int:
        return sum(bucket.bytes for bucket in self._buckets)

    def rest(self, tensors: Sequence[torch.Tensor], terms: Terms) -> None:
        """Nothing: the parameters went along with the header."""

    def abandon(self) -> None:
        """Nothing to do: only :meth:`write` writes."""

    def _pieces(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [piece for bucket in self._buckets for piece in pieces_of(bucket, tensors)]


def write_means(
    sums: Sequence[torch.Tensor], views: list[torch.Tensor], pieces: list[torch.Tensor], contributors: int
) -> None:
    """Divide ``sums``, whose ``views`` belong into ``pieces``, by the ranks that took part, and put the means there."""
    if sum(flat.numel() for flat in sums) < _SMALL * len(views):
        for flat in sums:
            flat.div_(contributors)
        torch._foreach_copy_(pieces, views)
    else:  # on the way back it costs no pass over memory, unlike Horovod's Average
        for piece, view in zip(pieces, views, strict=True):
            torch.div(view, contributors, out=piece)


def device_of(bucket: Bucket, tensors: Sequence[torch.Tensor]) -> torch.device:
    """Where the bucket travels from; one without pieces, in which ranks only meet, from the CPU."""
    return tensors[bucket.pieces[0].entry].device if bucket.pieces else torch.device("cpu")


def pieces_of(bucket: Bucket, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The blocks of the parameters that the bucket holds, as views with the parameters' own strides."""
    wire = ((wire_view(tensors[piece.entry]), piece.index) for piece in bucket.pieces)
    return [view[index] if index else view for view, index in wire]


def views_of(bucket: Bucket, flat: torch.Tensor) -> list[torch.Tensor]:
    """The same blocks where they are packed, one after another."""
    return [flat[piece.start : piece.stop].view(piece.shape) for piece in bucket.pieces]


def wire_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it travels, where a complex number is a pair of reals."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
