"""Parameters in one piece of memory, so that a round need not pack them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch

from ..adapters.torch_flat import is_dense, own
from ..collect import collect


def flatten_parameters(
    model: torch.nn.Module | torch.optim.Optimizer | Iterable[torch.Tensor], *, gradients: bool = False
) -> list[torch.Tensor]:
    """Move the parameters that are averaged into one piece of memory per dtype and device; call it on every rank.

    Every parameter stays the same object with the same values, strides, sharing, hooks and optimizer state, but becomes
    a view. A round then sums float32 and float64 parameters where they lie, without packing or memory of its own; other
    dtypes are still packed, since they are summed in float32, and so are float32 parameters beside them. What is later
    moved, converted or replaced (``.to()``, ``.half()``, ``load_state_dict(assign=True)``, a copy) is packed again,
    with one warning.

    A sum that fails on the way (another rank has died) has then overwritten the parameters, and the error says so;
    packed in one bucket, they would be as they were. Ranks that differ in step or layout find out before.

    Args:
        model: a model, an optimizer, or parameters; in the order in which they will be averaged.
        gradients: make every ``.grad`` a view of one tensor, too. ``zero_grad(set_to_none=False)`` keeps it so.

    Returns:
        One tensor of one dimension for each dtype and device: of the parameters, or with ``gradients``, of the
        gradients. It shares their memory, but autograd does not know: do not change it during backward.

    Raises:
        TypeError, ValueError: as :meth:`hvd_averaging.ModelAverager.average_parameters`; or two parameters, or a
            parameter and a buffer of the model, share memory without being the same object, which moving would end.

    Example::

        >>> model = torch.nn.Linear(3, 2)
        >>> [flat] = flatten_parameters(model)
        >>> flat.shape
        torch.Size([8])
        >>> bool((flat[:6].view(2, 3) == model.weight).all())
        True
    """
    collected = collect(model, apart=True)
    parameters: Sequence[torch.Tensor] = collected.tensors
    named = dict(zip((entry.name for entry in collected.layout.entries), parameters, strict=True))
    if isinstance(model, torch.nn.Module):
        named |= {**dict(model.named_parameters()), **dict(model.named_buffers())}
    _refuse_sharing(named, parameters)
    flats = []
    for group in _groups(parameters):
        flat = _flatten(group)
        own(flat, group)
        flats.append(_flatten_gradients(group) if gradients else flat)
    return flats


def _refuse_sharing(named: Mapping[str, torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
    """See that no memory of the ``parameters`` that will be moved is that of another tensor, too."""
    moved = {id(parameter) for parameter in parameters if is_dense(parameter)}
    spans = sorted(
        (*_span(tensor), id(tensor) in moved, name)
        for name, tensor in named.items()
        if tensor.layout is torch.strided and tensor.numel()
    )
    furthest = {False: (-1, ""), True: (-1, "")}  # where what was seen ends, by whether it will be moved
    for start, stop, moves, name in spans:
        end, other = max(furthest.values()) if moves else furthest[True]
        if start < end:
            raise ValueError(
                f"{name!r} shares memory with {other!r}, but is not the same parameter: tie them by using one "
                "parameter in both places, b.weight = a.weight."
            )
        furthest[moves] = max(furthest[moves], (stop, name))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between which the elements lie."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _groups(parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        if not is_dense(parameter):
            warnings.warn(
                f"A parameter of shape {list(parameter.shape)} has gaps in its memory and stays where it is, so that "
                "those of its dtype are packed.",
                stacklevel=3,
            )
            continue
        groups.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    return list(groups.values())


@torch.no_grad()
def _flatten(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    flat = _empty(parameters)
    for parameter, view in zip(parameters, _views(flat, parameters), strict=True):
        view.copy_(parameter)
        parameter.data = view
    return flat


@torch.no_grad()
def _flatten_gradients(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    flat = _empty(parameters).zero_()
    for parameter, view in zip(parameters, _views(flat, parameters), strict=True):
        if parameter.grad is not None:
            view.copy_(parameter.grad)
        parameter.grad = view
    return flat


def _empty(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    elements = sum(parameter.numel() for parameter in parameters)
    return torch.empty(elements, dtype=parameters[0].dtype, device=parameters[0].device)


def _views(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A tensor for each parameter, in ``flat``'s memory, but with a storage that ends where the parameter does.

    Else whoever saves one parameter would save them all.
    """
    views, start = [], 0
    for parameter in parameters:
        stop = start + parameter.numel() * flat.element_size()
        view = torch.empty(0, dtype=flat.dtype, device=flat.device)
        storage = torch.TypedStorage(wrap_storage=flat.untyped_storage()[start:stop], dtype=flat.dtype, _internal=True)
        views.append(view.set_(storage, 0, parameter.shape, parameter.stride()))
        start = stop
    return views
