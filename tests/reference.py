"""What averaging means, in NumPy, straight from the definitions: n ranks in one process, no code of the package.

``replicas`` is an array whose first axis is the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Replicas = NDArray[np.float64]
Local = Callable[[int, Replicas], Replicas]


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
