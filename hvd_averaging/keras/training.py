"""Callbacks around averaging, of which every data-parallel training needs some: metrics, learning rate, stopping."""

from __future__ import annotations

import struct
from typing import Any

import keras
import numpy as np

from ..channel import Channel
from ..errors import AveragingError, LayoutMismatchError
from ..layout import fingerprint
from .meeting import START_TIMEOUT, MeetingCallback


class MetricAverageCallback(MeetingCallback):
    """Replaces the metrics of an epoch by their mean over the ranks.

    After ``horovod.keras.callbacks.MetricAverageCallback``. Put it before the callbacks that look at metrics
    (``EarlyStopping``, ``ReduceLROnPlateau``, ``ModelCheckpoint``, ``TensorBoard``); ``History`` comes last by itself.
    The mean is that of the ranks, whatever the number of samples of each. It is formed in float64 and is bit for bit
    the same on all ranks. What is no number is left alone.

    Args:
        process_set: a ``horovod.ProcessSet``; ``None`` is all ranks.
        start_timeout: seconds to wait for the other ranks at the start of training; ``None`` waits for ever.

    Raises in fit:
        LayoutMismatchError: the ranks have other metrics; raised on every rank, before any was changed.
        AveragingError: another of its subclasses: another rank has not got this callback, or failed.
    """

    def __init__(self, process_set: Any = None, *, start_timeout: float | None = START_TIMEOUT) -> None:
        super().__init__(process_set, start_timeout)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        channel = self.channel()
        if channel is not None and logs is not None:
            average_in_place(logs, channel)


def average_in_place(logs: dict[str, Any], channel: Channel) -> None:
    """Replace every number, and array of numbers, in ``logs`` by its mean over the ranks of ``channel``."""
    arrays = {name: array for name in sorted(logs) if (array := _as_numbers(logs[name])) is not None}
    _check_same_metrics(arrays, channel)
    flat = [float(value) for array in arrays.values() for value in array.ravel()]
    # As the integers that their bits spell: sums of those with zeros are exact, and arrive the same everywhere.
    rows = channel.gather([_bits(value) for value in flat], f"keras.metrics.{len(flat)}")
    means = np.mean([[_from_bits(bits) for bits in row] for row in rows.values()], axis=0)
    start = 0
    for name, array in arrays.items():
        mean = means[start : start + array.size]
        logs[name] = float(mean[0]) if array.ndim == 0 else mean.reshape(array.shape)
        start += array.size


def _check_same_metrics(arrays: dict[str, np.ndarray[Any, Any]], channel: Channel) -> None:
    names = ", ".join(f"{name}{list(array.shape) if array.ndim else ''}" for name, array in arrays.items())
    rows = channel.gather([fingerprint(names)], "keras.metrics.names")
    if len({row[0] for row in rows.values()}) > 1:
        texts = channel.gather_text(names, "keras.metrics.text")
        listed = "; ".join(f"rank {rank}: {text or 'none'}" for rank, text in texts.items())
        raise LayoutMismatchError(
            f"{channel.where}: the ranks have different metrics at the end of this epoch: {listed}. Compile the model "
            "with the same metrics on every rank, and give validation data to all ranks or none."
        )


def _as_numbers(value: Any) -> np.ndarray[Any, Any] | None:
    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError):
        return None


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _from_bits(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


class StopTogetherCallback(MeetingCallback):
    """If one rank wants to stop, all stop at the end of the same epoch.

    A rank that stops alone leaves the others waiting for it in their next round. Put this callback after
    ``EarlyStopping`` and whatever else sets ``model.stop_training`` at the end of an epoch. (With metrics averaged
    before, all ranks decide alike anyway; this callback also covers decisions that only one rank can take.)

    Args:
        process_set: a ``horovod.ProcessSet``; ``None`` is all ranks.
        start_timeout: seconds to wait for the other ranks at the start of training; ``None`` waits for ever.

    Raises in fit:
        AveragingError: this rank stops, but decided so only after the ranks had agreed to go on; or one of its
            subclasses: another rank has not got this callback, or failed.

    Example::

        >>> stopping = keras.callbacks.EarlyStopping("val_loss", patience=3)  # doctest: +SKIP
        >>> model.fit(x, y, callbacks=[MetricAverageCallback(), stopping, StopTogetherCallback()])  # doctest: +SKIP
    """

    def __init__(self, process_set: Any = None, *, start_timeout: float | None = START_TIMEOUT) -> None:
        super().__init__(process_set, start_timeout)
        self._going_on = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._going_on = False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        channel = self.channel()
        if channel is None:
            return
        rows = channel.gather([bool(self.model.stop_training)], "keras.stop")
        self.model.stop_training = any(row[0] for row in rows.values())
        self._going_on = not self.model.stop_training

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._going_on and self.model.stop_training:
            raise AveragingError(
                "StopTogetherCallback: this rank stops training, but only decided so after the ranks had agreed to go "
                "on. Put StopTogetherCallback after EarlyStopping in the list of callbacks."
            )


class LearningRateWarmupCallback(MeetingCallback):
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr`` in the first epochs, batch by batch.

    The gradual warm-up of Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv:1706.02677, section 2.2; the
    arguments mean what they mean in ``horovod.keras.callbacks.LearningRateWarmupCallback``, so ``initial_lr`` is the
    rate that is already scaled by the number of ranks: at a fraction t of the warm-up the rate is
    ``initial_lr / size * (1 + t * (size - 1))``. After it the rate is left to the model and to other callbacks.

    Args:
        initial_lr: the learning rate at the end of the warm-up.
        warmup_epochs: how long it lasts, in epochs.
        momentum_correction: scale the momentum of ``keras.optimizers.SGD`` along with the rate (Goyal et al., section
            3, remark 2).
        steps_per_epoch: batches in an epoch, where Keras cannot know (a generator in the first epoch).
        process_set: whose ``size`` counts; ``None`` is all ranks.
        start_timeout: seconds to wait for the other ranks at the start of training; ``None`` waits for ever.

    Raises:
        ValueError: ``initial_lr`` or ``warmup_epochs`` is not positive; or, in ``fit``, the steps of an epoch are not
            known, or the optimizer has a learning rate schedule of its own.
        AveragingError: in ``fit``, one of its subclasses: another rank has not got this callback.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        *,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        process_set: Any = None,
        start_timeout: float | None = START_TIMEOUT,
    ) -> None:
        super().__init__(process_set, start_timeout)
        if not initial_lr > 0 or not warmup_epochs > 0:
            raise ValueError(f"initial_lr ({initial_lr!r}) and warmup_epochs ({warmup_epochs!r}) must be positive.")
        self.initial_lr = float(initial_lr)
        self.warmup_epochs = warmup_epochs
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0
        self._size = 1
        self._warming = False

    def describe(self) -> str:
        return f"LearningRateWarmupCallback(initial_lr={self.initial_lr}, warmup_epochs={self.warmup_epochs})"

    def check(self) -> None:
        super().check()
        if not isinstance(_plain(self.model.optimizer)._learning_rate, keras.Variable):
            raise ValueError(
                "LearningRateWarmupCallback cannot set the learning rate: the optimizer has a schedule of its own. "
                "Pass the optimizer a number, or leave this callback out."
            )
        if not self._steps():
            raise ValueError(
                "LearningRateWarmupCallback does not know how many batches an epoch has: pass it steps_per_epoch=."
            )

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._size = len(self.meet())
        self._warming = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        self._warming = self._size > 0 and (epoch < self.warmup_epochs or self._warming)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._warming:
            return
        # The first batch counts as done, so that epochs end on round numbers.
        progress = min(1.0, (self._epoch + (batch + 1) / self._steps()) / self.warmup_epochs)
        self._set_rate(self.initial_lr / self._size * (1 + progress * (self._size - 1)))
        self._warming = progress < 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["learning_rate"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _steps(self) -> int:
        return self.steps_per_epoch or (self.params or {}).get("steps") or 0

    def _set_rate(self, rate: float) -> None:
        optimizer = _plain(self.model.optimizer)
        ratio = rate / float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        optimizer.learning_rate = rate
        if self.momentum_correction and isinstance(optimizer, keras.optimizers.SGD) and optimizer.built:
            # SGD keeps velocity times rate: v <- momentum * v - rate * gradient.
            for velocity in getattr(optimizer, "momentums", None) or ():
                if velocity is not None:
                    velocity.assign(velocity * ratio)


def _plain(optimizer: Any) -> Any:
    """Without loss scaling around it."""
    return getattr(optimizer, "inner_optimizer", optimizer)
