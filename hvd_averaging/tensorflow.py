"""Everything for TensorFlow loops, by one import that loads TensorFlow and nothing of PyTorch.

The same objects as in :mod:`hvd_averaging`, which finds the framework by what it is given. Keras ``fit`` has
:mod:`hvd_averaging.keras`.
"""

import tensorflow  # noqa: F401 - an adapter is looked for among frameworks that are loaded

from .averagers import ModelAverager
from .hierarchical import HierarchicalModelAverager
from .periodic import PeriodicModelAverager
from .replicas import ReplicaReport, average_parameters, averaged, broadcast_parameters, check_replicas
from .round import Round
from .together import average_together

__all__ = [
    "HierarchicalModelAverager",
    "ModelAverager",
    "PeriodicModelAverager",
    "ReplicaReport",
    "Round",
    "average_parameters",
    "average_together",
    "averaged",
    "broadcast_parameters",
    "check_replicas",
]
