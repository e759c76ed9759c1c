"""Keras `fit`, three ways: averaging gradients at every step, averaging parameters now and then, one rank alone.

    horovodrun -np 4 python examples/keras_fit.py

Every rank trains on its own shard of scikit-learn's handwritten digits. The final models are compared by their test
accuracy and by what they cost in communication: in a table, and in a picture, ``output/keras_fit.png``.

The callbacks to copy are in ``average_parameters_now_and_then``.
"""

# mypy: allow-untyped-calls
# (Keras has no type hints.)

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import digits
import horovod.tensorflow as hvd
import keras
import options
from contest import Contest, Way

from hvd_averaging import PeriodicModelAverager
from hvd_averaging.keras import BroadcastCallback, DistributedOptimizer, ModelAveragingCallback

BATCH_SIZE = 16  # of every rank


class Task:
    """What the three ways have in common: data, first weights, optimizer."""

    def __init__(self, epochs: int, seed: int) -> None:
        train, self.test = digits.load()
        self.shard = train.shard(hvd.rank(), hvd.size())
        self.epochs = epochs
        self.seed = seed
        if len(self.shard) < BATCH_SIZE:
            raise SystemExit(f"{len(train)} digits are too few for {hvd.size()} ranks: {BATCH_SIZE} each at least.")

    @property
    def steps(self) -> int:
        return self.epochs * math.ceil(len(self.shard) / BATCH_SIZE)

    def optimizer(self) -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(learning_rate=0.05, momentum=0.9)

    def model(self, optimizer: keras.optimizers.Optimizer) -> keras.Model:
        keras.utils.set_random_seed(self.seed)  # of the order of batches, too
        layers = [keras.layers.Dense(256, activation="relu"), keras.layers.Dense(digits.CLASSES)]
        model = keras.Sequential([keras.Input((digits.PIXELS,)), *layers])
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def fit(self, model: keras.Model, callbacks: list[keras.callbacks.Callback]) -> None:
        images, labels = self.shard.images, self.shard.labels
        model.fit(images, labels, batch_size=BATCH_SIZE, epochs=self.epochs, callbacks=callbacks, verbose=0)

    def accuracy(self, model: keras.Model) -> Callable[[], float]:
        def accuracy() -> float:
            found = keras.ops.argmax(model(self.test.images), axis=1)
            return float(keras.ops.mean(keras.ops.equal(found, self.test.labels)))

        return accuracy


class Score(keras.callbacks.Callback):  # type: ignore[misc]
    """Tells the contest of every step, and of what was averaged with it."""

    def __init__(self, way: Way, averaging: ModelAveragingCallback | None = None, gradient_bytes: int = 0) -> None:
        super().__init__()
        self._way, self._averaging, self._gradient_bytes = way, averaging, gradient_bytes
        self._known: object = None

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._way.step(self._gradient_bytes + self._averaged_bytes())

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._way.round(self._averaged_bytes())

    def _averaged_bytes(self) -> int:
        done = self._averaging.last_round if self._averaging else None
        new, self._known = done is not self._known, done
        return done.bytes if done is not None and new else 0


def average_gradients_at_every_step(task: Task, contest: Contest) -> None:
    """What Horovod is known for."""
    model = task.model(DistributedOptimizer(task.optimizer()))
    gradient_bytes = sum(4 * math.prod(weight.shape) for weight in model.trainable_variables)

    with contest.way("gradient averaging", hvd.size(), task.accuracy(model)) as way:
        task.fit(model, [BroadcastCallback(), Score(way, gradient_bytes=gradient_bytes)])


def average_parameters_now_and_then(task: Task, contest: Contest, period: int, warmup_steps: int) -> None:
    """Local SGD: every rank takes its own steps with its own gradients, and in every round takes over the mean."""
    # Before the first round, in warm-up, every rank trains alone here. To average gradients meanwhile (post-local SGD),
    # give the model DistributedOptimizer(task.optimizer(), averager=averager).
    averager = PeriodicModelAverager(period, warmup_steps)
    model = task.model(task.optimizer())
    averaging = ModelAveragingCallback(averager)  # the steps since the last round count, too: it ends with one

    with contest.way("model averaging", hvd.size(), task.accuracy(model)) as way:
        task.fit(model, [BroadcastCallback(), averaging, Score(way, averaging)])


def train_alone(task: Task, contest: Contest) -> None:
    """What one rank makes of its own shard in as many steps, the others standing by: what talking has to beat."""
    if hvd.rank() == 0:
        model = task.model(task.optimizer())
        with contest.way("one rank, one shard", 1, task.accuracy(model)) as way:
            task.fit(model, [Score(way)])


def main(arguments: argparse.Namespace) -> None:
    hvd.init()
    task = Task(arguments.epochs, arguments.seed)
    contest = Contest(task.steps, hvd.rank(), hvd.size())
    average_gradients_at_every_step(task, contest)
    average_parameters_now_and_then(task, contest, arguments.period, arguments.warmup_steps)
    train_alone(task, contest)
    contest.show_results(arguments.output)


if __name__ == "__main__":
    main(options.parse((__doc__ or "").splitlines()[0]))
