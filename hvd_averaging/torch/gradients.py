"""Averaging gradients, beginning while backward is still running.

The same rounds as for parameters, over the same kind of agreed layout, except that a bucket sets out as soon as all of
its gradients are there. The last bucket waits for the end of backward: it carries the header, in which a rank says
whether what it sent early still holds.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from .. import header as headers
from ..adapters import Adapter, Pending
from ..adapters.torch_reduction import TorchReduction, wire_view
from ..agreement import Claim
from ..channel import Channel
from ..collect import Collected
from ..header import Presence
from ..layout import Bucket, Layout
from ..members import Members
from ..round import Round, Rounds

BUCKET_BYTES = 25 * 2**20
"""Small enough that there are several to overlap with backward, large enough that each is worth its latency."""

# What is in the note that travels with the gradients; the flags say of each parameter whether it has one.
_LOSS, _HAS_LOSS, _FLAGS = 0, 1, 2

_made: dict[str, int] = {}
"""How many reductions there have been by a name."""


class GradientRounds(Rounds):
    """Rounds over the gradients of parameters, which are given in the order of the model and travel in reverse."""

    call = "optimizer.step"
    apart = True  # parameters that share their memory have gradients of their own

    def __init__(self, name: str, process_set: Any, timeout: float | None, bucket_bytes: int | None) -> None:
        super().__init__(name, process_set, timeout, bucket_bytes)
        self._note = torch.zeros(_FLAGS, dtype=torch.float32)
        self._reduction: _GradientReduction | None = None
        self._early = True
        self.last: Round | None = None
        """What the latest round did."""

    def arrived(self, parameter: torch.Tensor) -> None:
        """Take a gradient that backward has just finished; its bucket may set out."""
        if self._early and self._reduction is not None:
            self._reduction.arrived(parameter)

    def expect_no_changes(self) -> None:
        """From now on gradients are final after backward, so that it pays to send them early."""
        self._early = True

    def average(self, named: Sequence[tuple[str, torch.Tensor]], step: int, settings: str, loss: Any = None) -> Any:
        """Make every gradient its mean over the ranks, where a missing one counts as zeros; returns the mean loss.

        A parameter that has no gradient on any rank keeps none.
        """
        backwards = list(reversed(named))
        if len(self._note) != _FLAGS + len(backwards):
            self._note = torch.zeros(_FLAGS + len(backwards), dtype=torch.float32)
        self._note[_LOSS] = 0.0 if loss is None else float(loss)
        self._note[_HAS_LOSS] = loss is not None
        met = self.run([*backwards, ("note", self._note)], step, settings)
        self.last = None if met is None else met[0]
        if loss is None:
            return None
        mean = float(self._note[_LOSS] / self._note[_HAS_LOSS])
        return torch.full_like(loss, mean) if isinstance(loss, torch.Tensor) else mean

    def _collect(self, params: object, presence: Presence) -> tuple[Collected, Exception | None]:
        collected, failure = super()._collect(params, presence)
        names = [entry.name for entry in collected.layout.entries]
        # One flag for each parameter that takes part: frozen ones do not, and are not among those of the reduction.
        flags = [float(tensor.grad is not None) for tensor in collected.tensors[:-1]]
        self._note[_FLAGS:] = torch.tensor(flags + [0.0] * (len(self._note) - _FLAGS - len(flags)))
        faults = (_fault(collected.adapter, *item) for item in zip(names, collected.tensors, strict=True))
        return collected, failure or next(filter(None, faults), None)

    def _fits(self, claim: Claim, tensors: Sequence[Any], agreed: Any) -> bool:
        stale = self._reduction is not None and self._reduction.is_stale()
        if stale:
            self._early = False  # or the next step would send everything twice, too
            warnings.warn(
                f"{self.name}: gradients were changed after backward() had sent them, so they are sent again. Call "
                "optimizer.synchronize() before you clip or unscale them, and put all but the last backward() of a "
                "step into `with optimizer.no_sync():`, to have them sent during backward().",
                stacklevel=7,
            )
        return not stale and super()._fits(claim, tensors, agreed)

    def _basis(self, adapter: Adapter, buckets: Sequence[Bucket], tensors: Sequence[Any]) -> int:
        return 0  # that of the parameters says nothing of the gradients

    def _make_reduction(
        self,
        layout: Layout,
        buckets: Sequence[Bucket],
        tensors: Sequence[Any],
        name: str,
        channel: Channel,
        same_basis: bool,
    ) -> _GradientReduction:
        # Gradients of two optimizers are under way at once, and may be alike in names and shapes (twin critics). Ranks
        # agree about the number, since those that Horovod has added later (elastic mode) have made fewer.
        made = channel.gather([_made.get(name, 0)], "gradients.made")
        _made[name] = 1 + max(row[0] for row in made.values())
        name = f"{name}.{_made[name]}"
        self._reduction = _GradientReduction(
            channel.adapter.hvd, buckets, tensors, name, channel.members, number_of_note=len(tensors) - 1
        )
        return self._reduction


class _GradientReduction(TorchReduction):
    """Buffers that fill during backward."""

    def __init__(
        self,
        hvd: Any,
        buckets: Sequence[Bucket],
        tensors: Sequence[torch.Tensor],
        name: str,
        members: Members,
        number_of_note: int,
    ) -> None:
        super().__init__(hvd, buckets, tensors, name, members)
        self._number_of_note = number_of_note
        self._serve(tensors)
        self._views_of: list[list[tuple[int, tuple[slice, ...], torch.Tensor]]] = [[] for _ in tensors]
        views = iter(self._views)
        for position, bucket in enumerate(buckets):
            for piece in bucket.pieces:
                self._views_of[piece.entry].append((position, piece.index, next(views)))
        self._reset()

    def _serve(self, tensors: Sequence[torch.Tensor]) -> None:
        self._parameters = list(tensors)
        self._numbers = {id(tensor): number for number, tensor in enumerate(tensors)}

    def _reset(self) -> None:
        # With the version, which changes increase, and the norm, as changes by `.data` and by GradScaler do not.
        self._packed: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._missing = [{piece.entry for piece in bucket.pieces} for bucket in self._buckets]
        self._under_way: dict[int, int] = {}

    def arrived(self, parameter: torch.Tensor) -> None:
        number = self._numbers.get(id(parameter))
        if number is None or any(position in self._under_way for position, _, _ in self._views_of[number]):
            return
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return
        if all(position == len(self._buckets) - 1 for position, _, _ in self._views_of[number]):
            return  # the last bucket waits for the end of backward in any case
        self._pack(number, gradient, early=True)
        for position, _, _ in self._views_of[number]:
            self._missing[position].discard(number)
            if not self._missing[position] and position != len(self._buckets) - 1 and position not in self._under_way:
                self._under_way[position] = self._sum(position)

    def is_stale(self) -> bool:
        """Whether a gradient is no longer what has been sent: it was clipped, unscaled, or added to."""
        sent = self._sent()
        if not all(map(self._is_packed, sent)):
            return True
        norms = [(self._packed[number][2], _norm(self._packed[number][0])) for number in sent]
        return not all(torch.equal(before.nan_to_num(), now.nan_to_num()) for before, now in norms)

    def _sent(self) -> set[int]:
        return {piece.entry for position in self._under_way for piece in self._buckets[position].pieces}

    def start(self, tensors: Sequence[torch.Tensor] | None, header: Sequence[float]) -> Pending:
        waiting = [position for position in range(len(self._buckets)) if position not in self._under_way]
        for position in waiting:
            if tensors is None:
                self._flat[position].zero_()
            self._flat[position][-headers.LENGTH :] = torch.tensor(header, dtype=self._flat[position].dtype)
        if tensors is not None:
            self._serve(tensors)
            # Afresh, unless a part of it is under way: then it has just been found unchanged.
            entries = {piece.entry for position in waiting for piece in self._buckets[position].pieces}
            for number in entries - self._sent():
                self._pack(number, self._source(number))
        self._under_way |= {position: self._sum(position) for position in waiting}
        self._handles = list(self._under_way.values())
        return self

    def result(self) -> list[float]:
        self._reset()
        return super().result()

    @torch.no_grad()
    def write(self, tensors: Sequence[torch.Tensor], contributors: int) -> None:
        note = self._parameters[self._number_of_note]
        self._unpack(self._number_of_note, note, contributors)
        flags = note[_FLAGS:].tolist()[: self._number_of_note]
        for number, used in enumerate(flags):
            parameter = self._parameters[number]
            if used:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._unpack(number, parameter.grad, contributors)

    def _source(self, number: int) -> torch.Tensor | None:
        return self._parameters[number] if number == self._number_of_note else self._parameters[number].grad

    def _is_packed(self, number: int) -> bool:
        gradient, version, _ = self._packed.get(number, (None, 0, None))
        return gradient is not None and gradient is self._source(number) and gradient._version == version

    @torch.no_grad()
    def _pack(self, number: int, source: torch.Tensor | None, early: bool = False) -> None:
        for _, index, view in self._views_of[number]:
            if source is None:
                view.zero_()
            else:
                view.copy_(wire_view(source)[index])
        if source is not None and early:
            self._packed[number] = source, source._version, _norm(source)

    def _unpack(self, number: int, target: torch.Tensor, contributors: int) -> None:
        for _, index, view in self._views_of[number]:
            torch.div(view, contributors, out=wire_view(target)[index])


@torch.no_grad()
def _norm(gradient: torch.Tensor) -> torch.Tensor:
    wire = wire_view(gradient)
    norm: torch.Tensor = torch.linalg.vector_norm(wire, dtype=torch.promote_types(wire.dtype, torch.float32))
    return norm


def _fault(adapter: Adapter, name: str, parameter: torch.Tensor) -> Exception | None:
    """Why a gradient cannot be averaged."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.is_sparse:
        return TypeError(
            f"The gradient of {name!r} is sparse, but only dense gradients can be averaged: make the layer with "
            "sparse=False, such as torch.nn.Embedding(..., sparse=False)."
        )
    try:
        adapter.check(f"the gradient of {name}", gradient)
    except (TypeError, ValueError) as error:
        return error
    return None
