"""What becomes of an optimizer's state (momentum, Adam's moments) when the parameters are averaged."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from ..companions import Companion, Rule

OPTIMIZER_STATE = ("local", "average", "reset")


def companions(optimizer: torch.optim.Optimizer) -> list[Companion]:
    """The state to average along with the parameters: tensors by their mean, numbers (step counts) by the maximum.

    A parameter that has no state yet on this rank gets that of a fresh optimizer: all ranks must bring the same.

    Raises:
        ValueError: the state is not made of tensors (L-BFGS keeps lists of them).
    """
    begin(optimizer)
    return [
        companion
        for number, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(p for p in group["params"] if p.requires_grad)
        for companion in _of_parameter(
            f"state of group{number}.{position}", optimizer.state.get(parameter, {}), scalar=parameter.ndim == 0
        )
    ]


def begin(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter without state the state that its first step would begin with."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                found = _first_state(optimizer, group, parameter)
                if found:
                    optimizer.state[parameter] = found


class _Firsts(dict[str, Any]):
    """The state of a parameter, which remembers what every item was at first."""

    def __init__(self) -> None:
        super().__init__()
        self.firsts: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.firsts.setdefault(key, value.detach().clone() if isinstance(value, torch.Tensor) else value)


def _first_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """What a first step makes, before it changes it; zeros would not do (the step sizes of Rprop).

    Only the optimizer itself knows, so a twin of it takes a step with a stand-in for the parameter.
    """
    stand_in = torch.nn.Parameter(torch.zeros_like(parameter))
    stand_in.grad = torch.zeros_like(parameter)
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # as a learning rate scheduler has patched it
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    twin.state = defaultdict(_Firsts)
    twin.param_groups = [{**group, "params": [stand_in]}]
    try:
        twin.step()
    except KeyError:  # one that makes all state when it is made, such as Adagrad, and serves no other parameter
        return {}
    firsts: dict[str, Any] = twin.state[stand_in].firsts
    return firsts


def _of_parameter(name: str, state: dict[str, Any], scalar: bool) -> Iterator[Companion]:
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            # The moments of a parameter without dimensions have none either: only the usual name tells a step count.
            counts = value.ndim == 0 and (not scalar or key == "step")
            yield Companion(f"{name}: {key}", value, Rule.MAXIMUM if counts else Rule.MEAN)
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
