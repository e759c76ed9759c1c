"""PyTorch: what can be averaged, how it is described, and what else has to be asked of the framework.

How parameters travel is in ``torch_reduction`` and, for those that lie in one piece of memory, ``torch_flat``.
"""

from __future__ import annotations

import math
import operator
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ..companions import Companion, Rule
from ..layout import MAX_BUCKET_ELEMENTS, Bucket, Entry
from ..members import Members
from . import Pending, Reduction, torch_flat
from .torch_delayed import DelayedReduction
from .torch_pipeline import BUCKET_BYTES, BUFFERS, PipelinedReduction
from .torch_reduction import Polled, TorchReduction
from .torch_wire import WireReduction

_SEEN: Sequence[Callable[[torch.Tensor], object]] = (
    torch.Tensor.data_ptr,
    operator.attrgetter("shape"),
    torch.Tensor.is_contiguous,
    operator.attrgetter("dtype"),
    operator.attrgetter("requires_grad"),
    type,
)
_CONTIGUOUS = _SEEN.index(torch.Tensor.is_contiguous)


class TorchAdapter:
    """The verbs of :class:`hvd_averaging.adapters.Adapter` for PyTorch."""

    framework = "torch"

    @property
    def hvd(self) -> Any:
        import horovod.torch

        return horovod.torch

    def native(self, thing: object) -> Any:
        variable = getattr(sys.modules.get("keras"), "Variable", ())
        held = thing.value if isinstance(thing, variable) else thing
        return held if isinstance(held, torch.Tensor) else None

    def open(self, thing: object, everything: bool) -> list[Any] | None:
        if isinstance(thing, torch.nn.Module):
            return [*thing.named_parameters(), *(thing.named_buffers() if everything else ())]
        if isinstance(thing, torch.optim.Optimizer):
            return thing.param_groups
        return None

    def buffers(self, model: object) -> list[Companion] | None:
        if not isinstance(model, torch.nn.Module):
            return None
        named = dict(model.named_buffers())
        names = {id(tensor): name for name, tensor in named.items()}
        means = {}
        for module in model.modules():
            mean, variance = getattr(module, "running_mean", None), getattr(module, "running_var", None)
            if id(mean) in names and id(variance) in names:  # buffers both, not parameters or plain attributes
                means[id(variance)] = Companion(names[id(mean)], mean, Rule.VARIANCE)
        centers = {id(center.tensor) for center in means.values()}
        return [
            Companion(name, tensor, _rule(tensor, id(tensor) in means), means.get(id(tensor)))
            for name, tensor in named.items()
            if id(tensor) not in centers
        ]

    def takes_part(self, tensor: torch.Tensor) -> bool:
        floating = tensor.is_floating_point() or tensor.is_complex()
        # A bare tensor was passed on purpose (say, from a state_dict); only a Parameter can be frozen.
        return floating and (tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter))

    def check(self, name: str, tensor: torch.Tensor) -> None:
        if torch.nn.parameter.is_lazy(tensor):
            raise ValueError(f"{name!r} has no shape yet: run one batch through the lazy module on every rank first.")
        if hasattr(tensor, "device_mesh"):
            raise TypeError(f"{name!r} is a DTensor, spread over several ranks: only whole replicas can be averaged.")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise TypeError(f"{name!r} is {tensor.layout}, but only dense tensors can be averaged.")
        if tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name!r} is on {tensor.device}, but Horovod only serves CPU and CUDA tensors.")
        if tensor.is_inference():
            raise ValueError(f"{name!r} was made in torch.inference_mode() and cannot be updated: use a clone() of it.")
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(f"{name!r} is a lazy conjugate or negative: pass tensor.resolve_conj().resolve_neg().")
        repeats = (stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
        if tensor.numel() and any(repeats):
            raise ValueError(f"{name!r} is an expanded tensor, whose elements share memory: pass tensor.contiguous().")

    def identity(self, name: str, tensor: torch.Tensor) -> Hashable:
        if not _is_plain(tensor):
            self.check(name, tensor)  # says why
        pointer = tensor.data_ptr() or id(tensor)  # tensors without elements all point nowhere
        return tensor.device, pointer, tensor.dtype, tensor.shape, tensor.stride()

    def glance(self, things: Sequence[object]) -> list[Any] | None:
        tensors = cast(Sequence[torch.Tensor], things)
        try:
            seen = [list(map(look, tensors)) for look in _SEEN]
            if not all(seen[_CONTIGUOUS]):  # or the shapes tell the strides
                seen.append(list(map(torch.Tensor.stride, tensors)))
            # Others on the same memory are not known to lie in that of all. Where all were replaced, the first tells.
            return [*seen, list(map(torch_flat.is_owned, tensors[:1]))]
        except (AttributeError, RuntimeError, TypeError, ValueError):  # nothing for us, or a closer look says why
            return None

    def entry(self, name: str, tensor: torch.Tensor, places: dict[Any, int]) -> Entry:
        place = places.setdefault(tensor.device, len(places))
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Entry(name, tuple(tensor.shape), dtype, tensor.device.type, place)

    def memory(self, buckets: Sequence[Bucket], tensors: Sequence[torch.Tensor]) -> int:
        return torch_flat.memory(buckets, tensors)

    def bucket_bytes(self, buckets: Sequence[Bucket]) -> int | None:
        # Two of this size would be under way at once, and Horovod would copy both together first.
        gains = any(bucket.device == "cpu" and bucket.bytes > BUFFERS * BUCKET_BYTES for bucket in buckets)
        return BUCKET_BYTES if gains else None

    def reduction(
        self, buckets: Sequence[Bucket], tensors: Sequence[torch.Tensor], name: str, members: Members, in_place: bool
    ) -> Reduction:
        kind: type[torch_flat.FlatReduction | PipelinedReduction | TorchReduction] = TorchReduction
        if in_place:
            kind = torch_flat.FlatReduction
        elif max(Counter(bucket.kind for bucket in buckets).values()) > BUFFERS:
            kind = PipelinedReduction
        with torch.inference_mode(False):  # the buffers serve later rounds, too, which may be outside
            return kind(self.hvd, buckets, tensors, name, members)

    def delayed_reduction(
        self, buckets: Sequence[Bucket], tensors: Sequence[torch.Tensor], name: str, members: Members
    ) -> DelayedReduction:
        with torch.inference_mode(False):
            return DelayedReduction(self.hvd, buckets, tensors, name, members)

    def wire_reduction(
        self, buckets: Sequence[Bucket], tensors: Sequence[torch.Tensor], name: str, members: Members, wire: str
    ) -> WireReduction:
        with torch.inference_mode(False):
            return WireReduction(self.hvd, buckets, tensors, name, members, wire)

    def sum_integers(self, values: Sequence[int], name: str, members: Members) -> Pending:
        sums = torch.tensor(values, dtype=torch.int64)
        handle = self.hvd.allreduce_async_(sums, name=name, op=self.hvd.Sum, process_set=members.process_set)
        return _PendingIntegers(self.hvd, handle)

    def broadcast(self, tensors: Sequence[torch.Tensor], name: str, root_rank: int, members: Members) -> Pending:
        return _TorchBroadcast(self.hvd, tensors, name, root_rank, members)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone()

    @torch.no_grad()
    def restore(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        tensor.copy_(copy)

    def numpy(self, tensor: torch.Tensor) -> NDArray[Any]:
        floating = tensor.is_floating_point()
        array: NDArray[Any] = tensor.detach().to("cpu", torch.float64 if floating else None, copy=True).numpy()
        return array

    @torch.no_grad()
    def assign(self, tensor: torch.Tensor, array: NDArray[Any]) -> None:
        tensor.copy_(torch.from_numpy(np.ascontiguousarray(array)).view(tensor.shape))

    def carrier(self, array: NDArray[np.float64]) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.tensor(array)

    def bytes_of(self, tensor: torch.Tensor) -> memoryview:
        return _as_bytes(tensor).cpu().numpy().data


class _PendingIntegers(Polled):
    def __init__(self, hvd: Any, handle: int) -> None:
        self._hvd, self._handles = hvd, [handle]

    def result(self) -> list[int]:
        sums: list[int] = self._hvd.synchronize(*self._handles).tolist()
        return sums


class _TorchBroadcast(Polled):
    """Bytes travel, so that every dtype arrives bit for bit; in blocks that Horovod can count."""

    def __init__(self, hvd: Any, tensors: Sequence[torch.Tensor], name: str, root_rank: int, members: Members) -> None:
        self._hvd, self._tensors = hvd, tensors
        self._flat = torch.cat([_as_bytes(tensor).cpu() for tensor in tensors] or [torch.empty(0, dtype=torch.uint8)])
        blocks = torch.split(self._flat, MAX_BUCKET_ELEMENTS)
        self._handles = [
            hvd.broadcast_async_(
                block, root_rank, name=f"{name}.{number}of{len(blocks)}", process_set=members.process_set
            )
            for number, block in enumerate(blocks, 1)
        ]

    @torch.no_grad()
    def result(self) -> Sequence[Any]:
        for handle in self._handles:
            self._hvd.synchronize(handle)
        start = 0
        for tensor in self._tensors:
            stop = start + tensor.numel() * tensor.element_size()
            received = self._flat[start:stop].clone().view(tensor.dtype)  # the clone is aligned for the dtype
            tensor.copy_(received.view(tensor.shape))
            start = stop
        return self._tensors


def _rule(buffer: torch.Tensor, is_variance: bool) -> Rule:
    if is_variance:
        return Rule.VARIANCE
    if buffer.is_floating_point() or buffer.is_complex():
        return Rule.MEAN
    return Rule.MAXIMUM if buffer.ndim == 0 and buffer.dtype is not torch.bool else Rule.KEEP


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor has memory of its own, that a pointer and strides describe."""
    return tensor.layout is torch.strided and not torch.nn.parameter.is_lazy(tensor)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().contiguous()
    if math.prod(dense.shape) == 0:
        return torch.empty(0, dtype=torch.uint8, device=dense.device)
    return dense.view(-1).view(torch.uint8)
