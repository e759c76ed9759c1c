"""Model averaging in Keras ``fit``: callbacks, and an optimizer that averages gradients.

For Keras 3 on the TensorFlow backend, and, the optimizer apart, on the torch backend. Example, under
``horovodrun -np 4 python train.py``::

    import horovod.tensorflow as hvd
    from hvd_averaging import PeriodicModelAverager
    from hvd_averaging.keras import BroadcastCallback, MetricAverageCallback, ModelAveragingCallback

    hvd.init()
    averager = PeriodicModelAverager(period=8)
    model.compile("sgd", loss)
    model.fit(
        shard_of_this_rank,
        callbacks=[BroadcastCallback(), ModelAveragingCallback(averager), MetricAverageCallback()],
    )
"""

from .averaging import BroadcastCallback, ModelAveragingCallback
from .optimizer import DistributedOptimizer
from .training import LearningRateWarmupCallback, MetricAverageCallback, StopTogetherCallback

__all__ = [
    "BroadcastCallback",
    "DistributedOptimizer",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "ModelAveragingCallback",
    "StopTogetherCallback",
]
