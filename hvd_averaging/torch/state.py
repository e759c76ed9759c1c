"""What becomes of an optimizer's state (momentum, Adam's moments) when the parameters are averaged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..companions import Companion, Rule

OPTIMIZER_STATE = ("local", "average", "reset")


def companions(optimizer: torch.optim.Optimizer) -> list[Companion]:
    """The state to average along with the parameters: tensors by their mean, numbers (step counts) by the maximum.

    A parameter that has no state yet on this rank gets what a fresh optimizer would start from, zeros: all ranks must
    bring the same.

    Raises:
        ValueError: the state is not made of tensors (L-BFGS keeps lists of them).
    """
    found: list[Companion] = []
    for number, group in enumerate(optimizer.param_groups):
        parameters = [parameter for parameter in group["params"] if parameter.requires_grad]
        example: dict[str, Any] = next((optimizer.state[p] for p in parameters if optimizer.state.get(p)), {})
        for position, parameter in enumerate(parameters):
            state = optimizer.state[parameter] if example else {}
            for key, like in example.items():
                if key not in state and isinstance(like, torch.Tensor):
                    state[key] = torch.zeros_like(like if like.ndim == 0 else parameter)
            found += _of_parameter(f"state of group{number}.{position}", state)
    return found


def _of_parameter(name: str, state: dict[str, Any]) -> Iterator[Companion]:
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            yield Companion(f"{name}: {key}", value, Rule.MAXIMUM if value.ndim == 0 else Rule.MEAN)
        elif isinstance(value, (list, tuple, dict)):
            raise ValueError(
                f'optimizer_state="average" cannot serve an optimizer whose {key!r} is a {type(value).__name__}: use '
                '"local" or "reset".'
            )


def reset(optimizer: torch.optim.Optimizer) -> None:
    """Start afresh from the averaged parameters: the state is of a trajectory that has ended."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
