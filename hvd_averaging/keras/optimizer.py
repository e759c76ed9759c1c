"""An optimizer that averages gradients over ranks: always, or only during the warm-up of an averager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras

from ..averagers import ModelAverager
from ..layout import fingerprint
from ..members import check_process_set, members


def DistributedOptimizer(optimizer: Any, process_set: Any = None, *, averager: ModelAverager | None = None) -> Any:
    """Make ``optimizer`` average gradients over ranks, by one grouped allreduce inside the train step.

    After ``horovod.keras.DistributedOptimizer``, for Keras 3 on the TensorFlow backend. The optimizer still counts as
    one of its own class, in ``isinstance`` and in what is saved: a saved model loads without this package.

    With ``averager``, gradients are averaged in the first ``averager.warmup_steps`` steps only, and not sent at all
    after them: that is post-local SGD (Lin et al., 2020, arXiv:1808.07217), with one number to set.

    A gradient that is ``None`` (on all ranks: the model is the same) stays ``None``; sparse gradients (``Embedding``)
    are made dense. 16-bit gradients are summed in float32. With ``gradient_accumulation_steps`` they are averaged at
    every batch.

    Args:
        optimizer: a Keras optimizer, or its name. Under ``mixed_float16`` pass
            ``keras.optimizers.LossScaleOptimizer(optimizer)``, so that all ranks skip a step together.
        process_set: a ``horovod.ProcessSet``; ``None`` is that of ``averager``, or all ranks. A rank outside it keeps
            its own gradients.
        averager: the :class:`hvd_averaging.PeriodicModelAverager` that averages parameters after the warm-up.

    Returns:
        The same optimizer, with all its state.

    Raises:
        TypeError: no Keras optimizer, or ``averager`` has no ``warmup_steps``.
        ValueError: ``optimizer`` averages gradients already; or, in ``compile``, it is put into a
            ``LossScaleOptimizer`` afterwards.
        RuntimeError: Keras does not run on TensorFlow; or, in ``fit``, the train step is compiled by XLA, which knows
            no Horovod (the callbacks of this package turn that off: Keras does it by default where there is a GPU).

    Example::

        >>> averager = PeriodicModelAverager(period=8, warmup_steps=100)  # doctest: +SKIP
        >>> optimizer = DistributedOptimizer(keras.optimizers.Adam(1e-3), averager=averager)  # doctest: +SKIP
        >>> model.compile(optimizer, "mse")  # doctest: +SKIP
        >>> model.fit(x, y, callbacks=[BroadcastCallback(), ModelAveragingCallback(averager)])  # doctest: +SKIP
    """
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            f"DistributedOptimizer needs Keras' TensorFlow backend, not {keras.backend.backend()!r}: set the "
            "environment variable KERAS_BACKEND=tensorflow, or average parameters only (ModelAveragingCallback)."
        )
    optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"DistributedOptimizer needs a Keras optimizer, not {type(optimizer).__name__}.")
    if averages_gradients(optimizer) or averages_gradients(getattr(optimizer, "inner_optimizer", None)):
        raise ValueError(f"The optimizer {optimizer.name!r} averages gradients already.")
    if averager is not None and not hasattr(averager, "warmup_steps"):
        raise TypeError(f"{type(averager).__name__} has no warmup_steps, so it cannot say when gradients are averaged.")
    check_process_set(process_set)
    if process_set is None and averager is not None:
        process_set = averager.process_set
    warmup_steps = None if averager is None else averager.warmup_steps
    object.__setattr__(optimizer, "__class__", _subclass(type(optimizer), process_set, warmup_steps))
    return optimizer


def averages_gradients(optimizer: object) -> bool:
    """Whether :func:`DistributedOptimizer` was here."""
    return isinstance(optimizer, _AveragesGradients)


class _AveragesGradients:
    """What is put before an optimizer's own class."""

    _mean: Callable[[list[Any]], list[Any]]
    _warmup_steps: int | None

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        super().apply(self._averaged(list(grads)), trainable_variables)  # type: ignore[misc]

    def _averaged(self, gradients: list[Any]) -> list[Any]:
        import tensorflow as tf

        there = [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]
        if not there or self._warmup_steps == 0:
            return gradients
        _refuse_xla()
        if self._warmup_steps is None:
            averaged = self._mean(there)
        else:
            warming = tf.cast(self.iterations, tf.int64) < self._warmup_steps  # type: ignore[attr-defined]
            averaged = tf.cond(warming, lambda: self._mean(there), lambda: there)
        rest = iter(averaged)
        return [None if gradient is None else next(rest) for gradient in gradients]

    def __setattr__(self, name: str, value: Any) -> None:
        # The first thing that LossScaleOptimizer does with what it is given, as `compile` does under mixed_float16.
        if name == "loss_scale_factor" and value is None:
            raise ValueError(
                "A LossScaleOptimizer around a DistributedOptimizer would leave ranks waiting, when one of them skips "
                "a step. Turn it around: DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))."
            )
        super().__setattr__(name, value)


def _subclass(base: type, process_set: Any, warmup_steps: int | None) -> type:
    import tensorflow as tf

    names = ("__module__", "__qualname__", "__doc__")
    return type(
        base.__name__,
        (_AveragesGradients, base),
        {
            **{name: getattr(base, name) for name in names},
            # Keras saves `__class__`: nobody who loads the model needs to know of averaging.
            "__class__": property(lambda self: base),
            # A function of its own, since only in one can a collective be given a name.
            "_mean": staticmethod(tf.function(partial(_mean, process_set), autograph=False)),
            "_warmup_steps": warmup_steps,
        },
    )


def _mean(process_set: Any, gradients: list[Any]) -> list[Any]:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    who = members(process_set, hvd)
    if not who.included or who.size == 1:
        return gradients
    wire = [_to_wire(gradient) for gradient in gradients]
    means: dict[int, Any] = {}
    for dtype in sorted({value.dtype.name for value in wire}):
        places = [place for place, value in enumerate(wire) if value.dtype.name == dtype]
        shapes = [tuple(wire[place].shape) for place in places]
        # A joined rank contributes zeros, to the number of ranks as well.
        *sums, ranks = hvd.mpi_ops._grouped_allreduce(
            [*(wire[place] for place in places), tf.ones([], dtype)],
            name=f"hvd_averaging.gradients.{dtype}.{fingerprint(str(shapes)):016x}",
            op=hvd.Sum,
            ignore_name_scope=True,
            process_set=who.process_set,
        )
        means.update(zip(places, (total / ranks for total in sums), strict=True))
    return [_from_wire(means[place], gradient) for place, gradient in enumerate(gradients)]


def _to_wire(gradient: Any) -> Any:
    """As Horovod can sum it: it knows no bfloat16, and 16-bit sums overflow."""
    import tensorflow as tf

    if gradient.dtype.is_complex:
        gradient = tf.stack([tf.math.real(gradient), tf.math.imag(gradient)], axis=-1)
    return gradient if gradient.dtype == tf.float64 else tf.cast(gradient, tf.float32)


def _from_wire(mean: Any, like: Any) -> Any:
    import tensorflow as tf

    if like.dtype.is_complex:
        return tf.cast(tf.complex(mean[..., 0], mean[..., 1]), like.dtype)
    return tf.cast(mean, like.dtype)


def _refuse_xla() -> None:
    import tensorflow as tf
    from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

    if not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise RuntimeError(
            "DistributedOptimizer averages gradients inside the train step, and XLA, which compiles it here, knows no "
            "Horovod: use model.compile(..., jit_compile=False)."
        )
