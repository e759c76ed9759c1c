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
from .torch_reduction import WIRE, HeaderSum, Polled, device_of, pieces_of, views_of, write_means

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
        self._flat = _in_turns(buckets, tensors)
        self._views = [views_of(bucket, flat) for bucket, flat in zip(buckets, self._flat, strict=True)]
        self._pieces: list[list[torch.Tensor]] = []
        self._under_way: deque[tuple[int, int]] = deque()

    @property
    def bytes(self) -> int:
        return sum(bucket.bytes for bucket in self._buckets)

    def start(self, tensors: Sequence[torch.Tensor] | None, header: Sequence[float]) -> Pending:
        return self._header.start(header)

    @torch.no_grad()
    def rest(self, tensors: Sequence[torch.Tensor], terms: Terms) -> Pending:
        self._terms = terms
        self._pieces = [pieces_of(bucket, tensors) for bucket in self._buckets]
        self._waiting: Iterator[int] = iter(range(len(self._buckets)))
        for _ in range(BUFFERS):
            self._send_next()
        return self

    @torch.no_grad()
    def done(self) -> bool:
        while self._under_way and self._hvd.poll(self._under_way[0][1]):
            number, handle = self._under_way.popleft()
            self._hvd.synchronize(handle)
            write_means([self._flat[number]], self._views[number], self._pieces[number], self._terms.contributors)
            self._send_next()
        return not self._under_way

    def result(self) -> Sequence[float]:
        return ()

    def write(self, tensors: Sequence[torch.Tensor], contributors: int) -> None:
        self._pieces = []  # all is written; keeps no parameter alive

    def abandon(self) -> None:
        """Nothing can be done: some means are written, as the error says."""

    @torch.no_grad()
    def _send_next(self) -> None:
        number = next(self._waiting, None)
        if number is None:
            return
        flat = self._flat[number]
        if not self._terms.contributes:
            flat.zero_()
        elif self._views[number]:
            torch._foreach_copy_(self._views[number], self._pieces[number])
        handle = self._hvd.grouped_allreduce_async_(
            [flat],
            name=f"{self._name}.{number + 1}of{len(self._buckets)}",
            op=self._hvd.Sum,
            process_set=self._members.process_set,
        )
        self._under_way.append((number, handle))


def _in_turns(buckets: Sequence[Bucket], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Memory for each bucket, which the one before the last has left: for each dtype and device, that of two."""
    turns = [
        (WIRE[bucket.dtype], device_of(bucket, tensors), number % BUFFERS) for number, bucket in enumerate(buckets)
    ]
    largest: dict[tuple[torch.dtype, torch.device, int], int] = {}
    for bucket, turn in zip(buckets, turns, strict=True):
        largest[turn] = max(largest.get(turn, 0), bucket.elements)
    flat = {turn: torch.empty(length, dtype=turn[0], device=turn[1]) for turn, length in largest.items()}
    return [flat[turn][: bucket.elements] for bucket, turn in zip(buckets, turns, strict=True)]
