"""Means of changes, in fewer bytes: what travels is how far the parameters have moved from the last agreed weights.

Those are the anchor, the same on every rank. Horovod cannot sum 8-bit integers or bfloat16, and its sums of float16
would be rounded at every hop, so each rank averages one shard of every bucket itself, in float32: the ranks exchange
coded shards, and then the coded means of them (``alltoall`` both times), as much traffic as an allreduce of coded
numbers. What coding leaves out is kept and added the next time, both for the changes that are sent and for the mean
that is sent back: error feedback in both directions, as in DoubleSqueeze (Tang et al., 2019, arXiv:1905.05957).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from ..layout import Bucket, Entry
from ..members import Members
from . import Pending, Terms
from .torch_codec import CODINGS, Coded, Coding, stretch_of
from .torch_reduction import WIRE, HeaderSum, Polled, device_of, pieces_of, views_of


class _Whole(Polled):
    """A bucket that travels as it is: its numbers, and what is under way."""

    def __init__(self, hvd: Any, bucket: Bucket, device: Any, name: str, members: Members, multiple: int = 1) -> None:
        self._hvd, self.bucket, self._name, self._members = hvd, bucket, name, members
        length = -(-bucket.elements // multiple) * multiple
        self.numbers = torch.zeros(length, dtype=WIRE[bucket.dtype], device=device)
        self.views = views_of(bucket, self.numbers)
        self._handles = []
        self._next: Callable[[], None] | None = None

    @property
    def bytes(self) -> int:
        """What this rank hands over."""
        return self.bucket.bytes

    def parts(self, entries: Sequence[Entry], named: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The blocks that the bucket holds, of tensors by name."""
        return [named[entries[piece.entry].name][piece.index] for piece in self.bucket.pieces]

    @torch.no_grad()
    def send(self, tensors: Sequence[torch.Tensor] | None, contributors: int) -> None:
        """Begin to make ``numbers`` the mean; with ``None`` this rank contributes nothing to it."""
        if not self.numbers.numel():
            return
        self.numbers.zero_()
        if tensors is not None:
            torch._foreach_copy_(self.views, pieces_of(self.bucket, tensors))
        self._handles = [
            self._hvd.grouped_allreduce_async_(
                [self.numbers], name=f"{self._name}.whole", op=self._hvd.Sum, process_set=self._members.process_set
            )
        ]
        self._next = lambda: self._divide(contributors)

    @torch.no_grad()
    def go_on(self) -> bool:
        """Do what follows the collective that has ended; whether another one has begun."""
        for handle in self._handles:
            self._hvd.synchronize(handle)
        step, self._next, self._handles = self._next, None, []
        if step is not None:
            step()
        return self._next is not None

    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        if self.views:
            torch._foreach_copy_(pieces_of(self.bucket, tensors), self.views)

    def _divide(self, contributors: int) -> None:
        self.numbers.div_(contributors)


class _Change(_Whole):
    """A bucket of which the change travels; ``numbers`` are the anchor, padded to equal shards."""

    def __init__(self, hvd: Any, bucket: Bucket, device: Any, name: str, members: Members, coding: Coding) -> None:
        super().__init__(hvd, bucket, device, name, members, members.size * coding.multiple)
        self._coding = coding
        self.residual = torch.zeros_like(self.numbers)
        shard = self.numbers.numel() // members.size
        self.shard_residual = torch.zeros_like(self.numbers[:shard])

        def rows(count: int) -> torch.Tensor:
            return torch.zeros(count, coding.row_bytes(shard), dtype=torch.uint8, device=device)

        # One row for each rank's shard: what is sent, and what is received of changes and then of means.
        self._sent, self._changes, self._means = (rows(members.size) for _ in range(3))
        self._stretches: _Stretches | None = None
        self.is_finite = True
        """Whether all the means that came were; every rank has received the same."""

    @property
    def change_bytes(self) -> int:
        """What this rank hands over when the change travels."""
        return self._sent.numel()

    @torch.no_grad()
    def send_change(self, tensors: Sequence[torch.Tensor] | None, scratch: torch.Tensor, contributors: int) -> None:
        """Begin to move the anchor by the mean change; with ``None`` this rank contributes nothing to it."""
        if tensors is None:
            self._sent.zero_()
        else:
            self._encode(tensors, scratch)
        self._exchange(self._changes, "changes")
        self._next = lambda: self._send_mean(contributors)

    def forget_residuals(self) -> None:
        self.residual.zero_()
        self.shard_residual.zero_()

    def _in_stretches(self) -> _Stretches:
        length = stretch_of(self.numbers)
        if self._stretches is None or self._stretches.length != length:
            anchor, residual = (flat.view(self._members.size, -1) for flat in (self.numbers, self.residual))
            self._stretches = _Stretches(
                self._coding, length, self._sent, self._changes, self._means, anchor, residual, self.shard_residual
            )
        return self._stretches

    def _encode(self, tensors: Sequence[torch.Tensor], scratch: torch.Tensor) -> None:
        now = scratch[: self.numbers.numel()]
        now[self.bucket.elements :].zero_()
        torch._foreach_copy_(views_of(self.bucket, now), pieces_of(self.bucket, tensors))
        stretches = self._in_stretches()
        afters = (after for shard in now.view(self._members.size, -1) for after in shard.split(stretches.length))
        for after, (coded, before, residual) in zip(afters, stretches.of_changes, strict=True):
            residual.add_(after.sub_(before))
            self._coding.encode(residual, coded)

    def _send_mean(self, contributors: int) -> None:
        for changes, coded, residual in self._in_stretches().of_mean:
            total = torch.zeros_like(residual)
            for change in changes:
                self._coding.add(change, total)
            residual.add_(total, alpha=1 / contributors)
            self._coding.encode(residual, coded)
        # The same for all. By an allgather it would take as many bytes, but Horovod puts several allgathers together,
        # and a large message between two hosts goes one way after the other over Gloo, at half the speed.
        self._sent[1:] = self._sent[0]
        self._exchange(self._means, "means")
        self._next = self._move

    def _exchange(self, received: torch.Tensor, what: str) -> None:
        # Horovod's public function would allocate the output anew each time.
        sizes = torch.empty(self._members.size, dtype=torch.int32)
        name, process_set = f"{self._name}.{what}", self._members.process_set
        self._handles = [self._hvd.mpi_ops._alltoall_async(self._sent, None, received, sizes, name, process_set)]

    def _move(self) -> None:
        self.is_finite = True
        for coded, anchor in self._in_stretches().of_means:
            self._coding.add(coded, anchor)
            self.is_finite = self.is_finite and self._coding.is_finite(coded)


class _Stretches:
    """What goes together in each step of a round, in views that are made once: that takes longer than some operations.

    Args:
        length: elements of a stretch.
        sent, changes, means: one row of bytes for each rank, as in :class:`_Change`.
        anchor, residual: one row of numbers for each rank's shard.
        shard_residual: those of this rank's mean.
    """

    def __init__(
        self,
        coding: Coding,
        length: int,
        sent: torch.Tensor,
        changes: torch.Tensor,
        means: torch.Tensor,
        anchor: torch.Tensor,
        residual: torch.Tensor,
        shard_residual: torch.Tensor,
    ) -> None:
        def coded(rows: torch.Tensor) -> list[list[Coded]]:
            return [coding.stretches(row, length) for row in rows]

        def split(shards: torch.Tensor) -> list[torch.Tensor]:
            return [stretch for shard in shards for stretch in shard.split(length)]

        to_send, anchors = coded(sent), split(anchor)
        self.length = length
        self.of_changes = list(zip(chain(*to_send), anchors, split(residual), strict=True))
        by_rank = zip(*coded(changes), strict=True)
        self.of_mean = list(zip(by_rank, to_send[0], shard_residual.split(length), strict=True))
        self.of_means = list(zip(chain(*coded(means)), anchors, strict=True))


class WireReduction(Polled):
    """Rounds of changes; the first one, and wherever the coding does not do, one of the parameters as they are."""

    _moved_by_asking = True
    overwrites = False

    def __init__(
        self,
        hvd: Any,
        buckets: Sequence[Bucket],
        tensors: Sequence[torch.Tensor],
        name: str,
        members: Members,
        wire: str,
    ) -> None:
        self._header = HeaderSum(hvd, f"{name}.header", members)
        devices = [device_of(bucket, tensors) for bucket in buckets]
        names = [f"{name}.{number}of{len(buckets)}" for number in range(1, len(buckets) + 1)]
        ways = zip(buckets, devices, names, strict=True)
        self._parcels = [
            _Whole(hvd, bucket, device, name, members)
            if bucket.exact or not bucket.elements
            else _Change(hvd, bucket, device, name, members, CODINGS[wire])
            for bucket, device, name in ways
        ]
        self._changing = [parcel for parcel in self._parcels if isinstance(parcel, _Change)]
        self._scratch: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._tensors: Sequence[torch.Tensor] | None = None
        self._under_way: deque[_Whole] = deque()
        self.history = 0
        self.bytes = 0

    def start(self, tensors: Sequence[torch.Tensor] | None, header: Sequence[float]) -> Pending:
        return self._header.start(header)

    def rest(self, tensors: Sequence[torch.Tensor], terms: Terms) -> Pending:
        self._tensors, self._contributors = tensors if terms.contributes else None, terms.contributors
        self._in_changes = terms.complete and self.history > 0
        self.bytes = 0
        self._under_way.clear()
        if not self._in_changes:
            self._send(self._parcels)
            return self
        self._send([parcel for parcel in self._parcels if not isinstance(parcel, _Change)])
        for parcel in self._changing:
            parcel.send_change(self._tensors, self._scratch_for(parcel.numbers), self._contributors)
            self.bytes += parcel.change_bytes
            self._under_way.append(parcel)
            self._go_on()
        return self

    def _go_on(self) -> None:
        """Only the one that has waited longest is asked: they end in turn, and asking all of them takes a while."""
        while self._under_way and self._under_way[0].done():
            parcel = self._under_way.popleft()
            if parcel.go_on():
                self._under_way.append(parcel)

    def done(self) -> bool:
        self._go_on()
        if self._under_way:
            return False
        if self._in_changes and not all(parcel.is_finite for parcel in self._changing):
            # Some rank's change is infinite, not a number, or too large for the coding: all ranks see that here.
            self._in_changes = False
            for parcel in self._changing:
                parcel.forget_residuals()
            self._send(self._changing)
            return False
        return True

    def result(self) -> Sequence[float]:
        return ()

    @torch.no_grad()
    def write(self, tensors: Sequence[torch.Tensor], contributors: int) -> None:
        for parcel in self._parcels:
            parcel.write(tensors)
        self._tensors = None  # keeps no parameter alive
        self.history += 1

    def abandon(self) -> None:
        """Nothing to do: only :meth:`write` writes."""

    def state(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """The anchor, the same on all ranks, and what this rank's coding has left out, by the names of the entries."""
        anchor, residual = _zeros(entries), _zeros(entries)
        for parcel in self._changing:
            torch._foreach_copy_(parcel.parts(entries, anchor), parcel.views)
            torch._foreach_copy_(parcel.parts(entries, residual), views_of(parcel.bucket, parcel.residual))
        shards = [parcel.shard_residual.cpu().clone() for parcel in self._changing]
        return {"anchor": anchor, "residual": residual, "shard_residuals": shards}

    @torch.no_grad()
    def restore(self, entries: Sequence[Entry], state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`; residuals that are not there, or are of other shards, are nothing."""
        for parcel in self._changing:
            torch._foreach_copy_(parcel.views, parcel.parts(entries, state["anchor"]))
            if state["residual"]:
                torch._foreach_copy_(views_of(parcel.bucket, parcel.residual), parcel.parts(entries, state["residual"]))
        for parcel, residual in zip(self._changing, state["shard_residuals"], strict=False):
            if len(residual) == len(parcel.shard_residual):
                parcel.shard_residual.copy_(residual)
        self.history = 1

    def _send(self, parcels: Sequence[_Whole]) -> None:
        for parcel in parcels:
            parcel.send(self._tensors, self._contributors)
            self.bytes += parcel.bytes
        self._under_way += parcels

    def _scratch_for(self, like: torch.Tensor) -> torch.Tensor:
        """Room for the parameters of one bucket at a time."""
        key = like.dtype, like.device
        if key not in self._scratch or len(self._scratch[key]) < len(like):
            self._scratch[key] = torch.empty_like(like)
        return self._scratch[key]


def _zeros(entries: Sequence[Entry]) -> dict[str, torch.Tensor]:
    return {
        entry.name: torch.zeros(entry.wire_shape, dtype=WIRE[entry.wire_dtype]) for entry in entries if not entry.exact
    }
