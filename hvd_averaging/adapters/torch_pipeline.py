"""Many buckets in two buffers: while one bucket is reduced, the mean of the last is written and the next is packed.

So a round needs the memory of two buckets, however large the model is. The price: the first means are written when the
last buckets have not been reduced yet, so ranks first make sure of each other by a collective of headers alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..layout import Bucket
from ..members import Members
from . import Pending, Terms
from .torch_reduction import WIRE, HeaderSum, Polled, device_of, pieces_of, views_of

BUFFERS = 2
BUCKET_BYTES = 32 * 2**20
"""What measured best: see `docs/performance.md`."""


class PipelinedReduction(Polled):
    """Sums bucket after bucket, and writes the means as they come."""

    _moved_by_asking = True
    overwrites = True
    history = 0

    def __init__(
        self, hvd: Any, buckets: Sequence[Bucket], tensors: Sequence[torch.Tensor], name: str, members: Members
    ) -> None:
        self._hvd, self._buckets, self._name, self._members = hvd, buckets, name, members
        self._header = HeaderSum(hvd, f"{name}.header", members)
        self._buffers = _Buffers(buckets, tensors)
        self._tensors: Sequence[torch.Tensor] = ()
        self._under_way: deque[tuple[int, torch.Tensor, int]] = deque()

    @property
    def bytes(self) -> int:
        return sum(bucket.bytes for bucket in self._buckets)

    def start(self, tensors: Sequence[torch.Tensor] | None, header: Sequence[float]) -> Pending:
        return self._header.start(header)

    @torch.no_grad()
    def rest(self, tensors: Sequence[torch.Tensor], terms: Terms) -> Pending:
        self._tensors, self._terms = tensors, terms
        self._waiting: Iterator[int] = iter(range(len(self._buckets)))
        for _ in range(BUFFERS):
            self._send_next()
        return self

    @torch.no_grad()
    def done(self) -> bool:
        while self._under_way and self._hvd.poll(self._under_way[0][2]):
            number, flat, handle = self._under_way.popleft()
            self._hvd.synchronize(handle)
            bucket = self._buckets[number]
            for piece, view in zip(pieces_of(bucket, self._tensors), views_of(bucket, flat), strict=True):
                torch.div(view, self._terms.contributors, out=piece)
            self._send_next()
        return not self._under_way

    def result(self) -> Sequence[float]:
        return ()

    def write(self, tensors: Sequence[torch.Tensor], contributors: int) -> None:
        self._tensors = ()  # all is written; keeps no parameter alive

    def abandon(self) -> None:
        """Nothing can be done: some means are written, as the error says."""

    @torch.no_grad()
    def _send_next(self) -> None:
        number = next(self._waiting, None)
        if number is None:
            return
        bucket = self._buckets[number]
        flat = self._buffers.take(number)
        if not self._terms.contributes:
            flat.zero_()
        elif bucket.pieces:
            torch._foreach_copy_(views_of(bucket, flat), pieces_of(bucket, self._tensors))
        handle = self._hvd.grouped_allreduce_async_(
            [flat],
            name=f"{self._name}.{number + 1}of{len(self._buckets)}",
            op=self._hvd.Sum,
            process_set=self._members.process_set,
        )
        self._under_way.append((number, flat, handle))


class _Buffers:
    """Memory for buckets, which take turns: for each dtype and device, what the largest two in a row need."""

    def __init__(self, buckets: Sequence[Bucket], tensors: Sequence[torch.Tensor]) -> None:
        self._buckets = buckets
        self._kinds = [(WIRE[bucket.dtype], device_of(bucket, tensors)) for bucket in buckets]
        largest: dict[Any, int] = {}
        for number, (bucket, kind) in enumerate(zip(buckets, self._kinds, strict=True)):
            turn = (kind, number % BUFFERS)
            largest[turn] = max(largest.get(turn, 0), bucket.elements)
        self._flat = {
            (kind, turn): torch.empty(length, dtype=kind[0], device=kind[1]) for (kind, turn), length in largest.items()
        }

    def take(self, number: int) -> torch.Tensor:
        """The buffer of a bucket, which the bucket before the last one has left."""
        return self._flat[self._kinds[number], number % BUFFERS][: self._buckets[number].elements]
