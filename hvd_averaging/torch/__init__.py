"""Everything for PyTorch loops: what is in :mod:`hvd_averaging` but the errors, and post-local SGD as one optimizer.

Imports nothing of TensorFlow. Example, under ``horovodrun -np 8 python train.py``::

    import horovod.torch as hvd
    from hvd_averaging.torch import PeriodicModelAverager, PostLocalSGDOptimizer, broadcast_parameters

    hvd.init(process_sets="dynamic")
    broadcast_parameters(model)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        PeriodicModelAverager(period=8, warmup_steps=1000),
    )
    for inputs, targets in loader:
        loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
"""

from ..averagers import ModelAverager
from ..hierarchical import HierarchicalModelAverager
from ..periodic import PeriodicModelAverager
from ..replicas import ReplicaReport, average_parameters, averaged, broadcast_parameters, check_replicas
from ..round import Round
from ..together import average_together
from .flat import flatten_parameters
from .optimizer import PostLocalSGDOptimizer

__all__ = [
    "HierarchicalModelAverager",
    "ModelAverager",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "ReplicaReport",
    "Round",
    "average_parameters",
    "average_together",
    "averaged",
    "broadcast_parameters",
    "check_replicas",
    "flatten_parameters",
]
