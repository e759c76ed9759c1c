"""Model averaging (local SGD and its descendants) for Horovod.

Workers train on their own and average *parameters* now and then instead of *gradients* at every step. The names
below are loaded on first use, so that ``import hvd_averaging`` imports no framework and costs next to nothing.

Example, under ``horovodrun -np 4 python train.py``::

    from hvd_averaging import PeriodicModelAverager, broadcast_parameters

    broadcast_parameters(model)                      # equal starts
    averager = PeriodicModelAverager(period=8, warmup_steps=100)
    for batch, target in loader:
        ...
        optimizer.step()
        averager.average_parameters(model)           # one call is one optimizer step
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .averagers import ModelAverager
    from .errors import (
        AveragingError,
        AveragingTimeoutError,
        CollectiveError,
        HorovodNotInitializedError,
        LayoutMismatchError,
        PeerError,
        ProcessSetError,
        StepMismatchError,
    )
    from .hierarchical import HierarchicalModelAverager
    from .periodic import PeriodicModelAverager
    from .replicas import ReplicaReport, average_parameters, averaged, broadcast_parameters, check_replicas
    from .round import Round
    from .together import average_together

__version__ = "0.1.0.dev0"

_HOMES = {
    "averagers": ("ModelAverager",),
    "errors": (
        "AveragingError",
        "AveragingTimeoutError",
        "CollectiveError",
        "HorovodNotInitializedError",
        "LayoutMismatchError",
        "PeerError",
        "ProcessSetError",
        "StepMismatchError",
    ),
    "hierarchical": ("HierarchicalModelAverager",),
    "periodic": ("PeriodicModelAverager",),
    "replicas": ("ReplicaReport", "average_parameters", "averaged", "broadcast_parameters", "check_replicas"),
    "round": ("Round",),
    "together": ("average_together",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AveragingError",
    "AveragingTimeoutError",
    "CollectiveError",
    "HierarchicalModelAverager",
    "HorovodNotInitializedError",
    "LayoutMismatchError",
    "ModelAverager",
    "PeerError",
    "PeriodicModelAverager",
    "ProcessSetError",
    "ReplicaReport",
    "Round",
    "StepMismatchError",
    "average_parameters",
    "average_together",
    "averaged",
    "broadcast_parameters",
    "check_replicas",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
