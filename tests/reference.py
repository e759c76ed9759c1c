"""What averaging means, in NumPy, straight from the definitions: n ranks in one process, no code of the package.

``replicas`` is an array whose first axis is the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Replicas = NDArray[np.float64]
Local = Callable[[int, Replicas], Replicas]
Gradient = Callable[[int, Replicas], Replicas]
State = dict[str, Any]
Update = Callable[[Replicas, Replicas, State], Replicas]


def periodic_rounds(steps: int, period: int, warmup_steps: int = 0) -> list[int]:
    """The steps with a round: the first one after warm-up, then every ``period``."""
    return list(range(warmup_steps, steps, period))


def average(replicas: Replicas, ranks: Sequence[int] | None = None) -> Replicas:
    """The given ranks (all by default) take over their mean; the others keep what they have."""
    members = list(range(len(replicas)) if ranks is None else ranks)
    averaged = replicas.copy()
    averaged[members] = replicas[members].mean(axis=0)
    return averaged


def local_sgd(replicas: Replicas, steps: int, period: int, local: Local, warmup_steps: int = 0) -> list[Replicas]:
    """The replicas after every step: a local step on each rank, then a round if one is due.

    Stich, "Local SGD converges fast and communicates little", 2019, algorithm 1, with synchronisation indices
    ``periodic_rounds``.
    """
    history = []
    due = set(periodic_rounds(steps, period, warmup_steps))
    for step in range(steps):
        replicas = local(step, replicas)
        replicas = average(replicas) if step in due else replicas
        history.append(replicas)
    return history


def sgd(lr: float, momentum: float = 0.0) -> Update:
    """Heavy-ball SGD as PyTorch defines it: the velocity starts as the first gradient, which zeros amount to."""

    def update(weights: Replicas, gradients: Replicas, state: State) -> Replicas:
        state["velocity"] = momentum * state.get("velocity", 0.0) + gradients
        return weights - lr * state["velocity"]

    return update


def adam(lr: float, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> Update:
    """Kingma & Ba, "Adam", 2015, algorithm 1."""

    def update(weights: Replicas, gradients: Replicas, state: State) -> Replicas:
        state["count"] = state.get("count", 0) + 1
        state["first"] = beta1 * state.get("first", 0.0) + (1 - beta1) * gradients
        state["second"] = beta2 * state.get("second", 0.0) + (1 - beta2) * gradients**2
        first, second = state["first"] / (1 - beta1 ** state["count"]), state["second"] / (1 - beta2 ** state["count"])
        return weights - lr * first / (np.sqrt(second) + eps)

    return update


def post_local_sgd(
    replicas: Replicas,
    steps: int,
    period: int,
    warmup_steps: int,
    gradient: Gradient,
    update: Update,
    groups: Sequence[Sequence[int]] = (),
    optimizer_state: str = "local",
) -> list[Replicas]:
    """The replicas after every step of Lin et al., "Don't use large mini-batches, use local SGD", 2020, algorithm 1.

    Gradients are averaged over all ranks before ``warmup_steps``, then within ``groups``; parameters by
    ``periodic_rounds``, and with them the optimizer's state becomes its mean, or is forgotten.
    """
    history = []
    state: State = {}
    due = set(periodic_rounds(steps, period, warmup_steps))
    for step in range(steps):
        gradients = gradient(step, replicas)
        for group in groups if step >= warmup_steps else [range(len(replicas))]:
            gradients = average(gradients, group)
        replicas = update(replicas, gradients, state)
        if step in due:
            replicas = average(replicas)
            if optimizer_state == "average":
                state = {name: average(value) if name != "count" else value for name, value in state.items()}
            elif optimizer_state == "reset":
                state = {}
        history.append(replicas)
    return history


def delayed_local_sgd(
    replicas: Replicas, steps: int, period: int, delay: int, local: Local, warmup_steps: int = 0, fragments: int = 1
) -> list[Replicas]:
    """The replicas after every step, if what averaging changes is added ``delay`` steps later.

    Each column belongs to one of ``fragments`` equal parts; part k is averaged at
    ``warmup_steps + k * period / fragments`` and every ``period`` steps after that.
    """
    history = []
    width = replicas.shape[1] // fragments
    changes: dict[int, list[tuple[slice, Replicas]]] = {}
    for step in range(steps):
        replicas = local(step, replicas)
        for columns, change in changes.pop(step, []):
            replicas[:, columns] += change
        turn, rest = divmod(step - warmup_steps, period // fragments)
        if step >= warmup_steps and rest == 0:
            columns = slice(turn % fragments * width, (turn % fragments + 1) * width)
            part = replicas[:, columns]
            change = average(part) - part
            if delay:
                changes.setdefault(step + delay, []).append((columns, change))
            else:
                replicas[:, columns] += change
        history.append(replicas.copy())
    return history


def rounded(numbers: Replicas, wire: str, block: int = 512) -> Replicas:
    """What is left of numbers (the last axis in blocks) after they travelled as ``wire``."""
    narrow = numbers.astype(np.float32)
    if wire == "fp16":
        return narrow.astype(np.float16).astype(np.float64)
    if wire == "bf16":  # the upper half of the bits, to nearest, ties to even
        bits = narrow.view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)
        return bits.astype(np.uint32).view(np.float32).astype(np.float64)
    blocks = numbers.reshape(*numbers.shape[:-1], -1, block)
    step = (np.abs(blocks).max(axis=-1, keepdims=True) / 127).astype(np.float32)
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step > 0)
    return (np.rint(blocks * inverse.astype(np.float64)) * step.astype(np.float64)).reshape(numbers.shape)


def local_sgd_in_changes(replicas: Replicas, steps: int, period: int, local: Local, wire: str) -> list[Replicas]:
    """The replicas after every step, if in all rounds but the first the rounded change since the last one travels.

    What rounding leaves out is added to the next change, on every rank and for the mean that comes back: Tang et al.,
    "DoubleSqueeze", 2019, algorithm 1, with the change of the weights in the place of the gradient.
    """
    history = []
    columns = -(-replicas.shape[1] // 512) * 512
    left_out, left_out_of_mean = np.zeros((len(replicas), columns)), np.zeros(columns)
    anchor = None
    due = set(periodic_rounds(steps, period))
    for step in range(steps):
        replicas = local(step, replicas)
        if step in due and anchor is None:
            replicas = average(replicas)
            anchor = replicas[0]
        elif step in due:
            change = np.zeros_like(left_out)
            change[:, : replicas.shape[1]] = replicas - anchor
            change += left_out
            sent = rounded(change, wire)
            left_out = change - sent
            mean = sent.mean(axis=0) + left_out_of_mean
            received = rounded(mean, wire)
            left_out_of_mean = mean - received
            anchor = anchor + received[: replicas.shape[1]]
            replicas = np.tile(anchor, (len(replicas), 1))
        history.append(replicas)
    return history
