"""Parameters that lie one after another in one piece of memory, which Horovod can reduce without packing.

Whether they do is seen from their addresses in every round, since much can move them: ``.to()``, ``.half()``, loading
with ``assign=True``, a copy. Which tensor holds the whole is noted here by :func:`own`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..layout import Bucket, fingerprint
from ..members import Members
from . import Pending, Terms
from .torch_reduction import WIRE, HeaderSum, Polled, device_of, pieces_of, views_of, write_means

_owners = WeakIdKeyDictionary()  # parameter to the tensor of all its neighbours


def own(flat: torch.Tensor, parameters: Iterable[torch.Tensor]) -> None:
    """Note that ``parameters`` lie in ``flat``."""
    for parameter in parameters:
        _owners[parameter] = flat


def memory(buckets: Sequence[Bucket], tensors: Sequence[torch.Tensor]) -> int:
    """A hash of how the tensors lie in memory; 0 if no bucket lies there as it would be packed."""
    if not len(_owners):
        return 0
    flats = [flat_of(bucket, tensors) is not None for bucket in buckets]
    strides = [
        tensors[piece.entry].stride()
        for bucket, flat in zip(buckets, flats, strict=True)
        for piece in bucket.pieces
        if flat
    ]
    return fingerprint(f"{flats}{strides}") if any(flats) else 0


def flat_of(bucket: Bucket, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The one tensor that just the pieces of ``bucket`` make up, in order; ``None`` if there is none."""
    if not bucket.pieces or any(piece.index for piece in bucket.pieces):
        return None
    flat = _owner(bucket, tensors)
    if flat is None or flat.dtype != WIRE[bucket.dtype] or flat.numel() != bucket.elements:
        return None
    start, itemsize = flat.data_ptr(), flat.element_size()
    for piece in bucket.pieces:
        tensor = tensors[piece.entry]
        in_place = tensor.data_ptr() == start + piece.start * itemsize or not tensor.numel()
        if not in_place or tensor.dtype != flat.dtype or tensor.device != flat.device or not is_dense(tensor):
            return None
    return flat


def is_owned(thing: object) -> bool:
    """Whether ``thing`` is a parameter that was moved into the memory of all."""
    return thing in _owners


def _owner(bucket: Bucket, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """What :func:`own` was told. Some of the parameters may have been replaced by others on the same memory since."""
    owners = (_owners.get(tensors[piece.entry]) for piece in bucket.pieces)
    return next((flat for flat in owners if flat is not None), None)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one piece of memory without gaps, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


class FlatReduction(Polled):
    """Sums parameters where they lie.

    A sum takes the place of the parameters, so ranks first make sure of each other by a collective of headers alone.
    """

    overwrites = True
    history = 0

    def __init__(
        self, hvd: Any, buckets: Sequence[Bucket], tensors: Sequence[torch.Tensor], name: str, members: Members
    ) -> None:
        self._hvd, self._buckets, self._name, self._members = hvd, buckets, name, members
        self._header = HeaderSum(hvd, f"{name}.header", members)
        self._strides = [tensor.stride() for tensor in tensors]
        self._in_place = [flat_of(bucket, tensors) is not None for bucket in buckets]
        self._devices = [device_of(bucket, tensors) for bucket in buckets]
        self._handles = []
        self._sums: list[torch.Tensor] = []
        self._packed: list[bool] = []

    @property
    def bytes(self) -> int:
        return sum(bucket.bytes for bucket in self._buckets)

    def start(self, tensors: Sequence[torch.Tensor] | None, header: Sequence[float]) -> Pending:
        return self._header.start(header)

    def result(self) -> Sequence[float]:
        for handle in self._handles:
            self._hvd.synchronize(handle)
        return ()

    @torch.no_grad()
    def rest(self, tensors: Sequence[torch.Tensor], terms: Terms) -> Pending:
        self._sums, self._packed = [], []
        for number, bucket in enumerate(self._buckets):
            # That they still lie there was seen when the layout was compared.
            flat = _owner(bucket, tensors) if self._in_place[number] and terms.contributes else None
            self._packed.append(flat is None)
            self._sums.append(self._pack(number, tensors if terms.contributes else None) if flat is None else flat)
        count = len(self._sums)
        self._handles = [self._sum(flat, f"{number}of{count}") for number, flat in enumerate(self._sums, 1)]
        if not all(self._packed):
            # Autograd cannot see that they share memory. It is told while the sums are on their way.
            torch.autograd.graph.increment_version(tensors)
        return self

    @torch.no_grad()
    def write(self, tensors: Sequence[torch.Tensor], contributors: int) -> None:
        for number, (bucket, flat, packed) in enumerate(zip(self._buckets, self._sums, self._packed, strict=True)):
            if packed:
                write_means([flat], self._views(number, flat), pieces_of(bucket, tensors), contributors)
            else:
                flat.div_(contributors)
        self._sums = []

    def abandon(self) -> None:
        """Nothing can be done: the sum may still take the place of the parameters, as the error says."""

    def _sum(self, tensor: torch.Tensor, part: str) -> int:
        handle: int = self._hvd.grouped_allreduce_async_(
            [tensor], name=f"{self._name}.{part}", op=self._hvd.Sum, process_set=self._members.process_set
        )
        return handle

    def _pack(self, number: int, tensors: Sequence[torch.Tensor] | None) -> torch.Tensor:
        """For a rank that brings nothing, and for what does not lie flat, such as a few buffers of the model."""
        bucket = self._buckets[number]
        flat = torch.zeros(bucket.elements, dtype=WIRE[bucket.dtype], device=self._devices[number])
        if tensors is not None and bucket.pieces:
            torch._foreach_copy_(self._views(number, flat), pieces_of(bucket, tensors))
        return flat

    def _views(self, number: int, flat: torch.Tensor) -> list[torch.Tensor]:
        """The pieces of a bucket, with strides as in the memory of all ranks if that is where they are reduced."""
        if self._in_place[number]:
            pieces = self._buckets[number].pieces
            return [flat.as_strided(piece.shape, self._strides[piece.entry], piece.start) for piece in pieces]
        return views_of(self._buckets[number], flat)
