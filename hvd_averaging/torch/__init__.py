"""Post-local SGD for PyTorch loops, as one optimizer. Example, under ``horovodrun -np 8 python train.py``::

import horovod.torch as hvd
from hvd_averaging import PeriodicModelAverager, broadcast_parameters
from hvd_averaging.torch import PostLocalSGDOptimizer

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

from .optimizer import PostLocalSGDOptimizer

__all__ = ["PostLocalSGDOptimizer"]
