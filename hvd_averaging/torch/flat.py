"""Parameters in one piece of memory, so that a round need not pack them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch

from ..adapters.torch_flat import is_dense, own
from ..collect import collect


def flatten_parameters(
    model: torch.nn.Module | torch.optim.Optimizer | Iterable[torch.Tensor], *, gradients: bool = False
) -> list[torch.Tensor]:
    """Move the parameters that are averaged into one piece of memory per dtype and device; call it on every rank.

    Every parameter stays the same object with the same values, strides, sharing, hooks and optimizer state, but becomes
    a view. A round then sums float32 and float64 parameters where they lie, without packing or memory of its own; other
    dtypes are still packed, since they are summed in float32. What is later moved, converted or replaced (``.to()``,
    ``.half()``, ``load_state_dict(assign=True)``, a copy) is packed again, with one warning.

    A sum that fails on the way (another rank has died) has then overwritten the parameters, and the error says so;
    packed rounds leave them as they were. Ranks that differ in step or layout find out before.

    Args:
        model: a model, an optimizer, or parameters; in the order in which they will be averaged.
        gradients: make every ``.grad`` a view of one tensor, too. ``zero_grad(set_to_none=False)`` keeps it so.

    Returns:
        One tensor of one dimension for each dtype and device: of the parameters, or with ``gradients``, of the
        gradients. It shares their memory, but autograd does not know: do not change it during backward.

    Raises:
        TypeError, ValueError: as :meth:`hvd_averaging.ModelAverager.average_parameters`; or two parameters of a model
            share memory without being the same object, which moving would end.

    Example::

        >>> model = torch.nn.Linear(3, 2)
        >>> [flat] = flatten_parameters(model)
        >>> flat.shape
        torch.Size([8])
        >>> bool((flat[:6].view(2, 3) == model.weight).all())
        True
    """
    parameters: Sequence[torch.Tensor] = collect(model).tensors
    _refuse_aliases(model, parameters)
    flats = []
    for group in _groups(parameters):
        flat = _flatten(group)
        own(flat, group)
        flats.append(_flatten_gradients(group) if gradients else flat)
    return flats


def _refuse_aliases(model: object, parameters: Sequence[torch.Tensor]) -> None:
    known = {parameter.data_ptr(): parameter for parameter in parameters if parameter.numel()}
    for name, parameter in model.named_parameters() if isinstance(model, torch.nn.Module) else ():
        if known.get(parameter.data_ptr(), parameter) is not parameter:
            raise ValueError(
                f"{name!r} shares memory with another parameter, but is not the same one: tie them by using one "
                "parameter in both places, b.weight = a.weight."
            )


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
