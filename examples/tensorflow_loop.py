"""A TensorFlow training loop, three ways: averaging gradients at every step, parameters now and then, one rank alone.

    horovodrun -np 4 python examples/tensorflow_loop.py

Every rank trains on its own shard of scikit-learn's handwritten digits. The final models are compared by their test
accuracy and by what they cost in communication: in a table, and in a picture, ``output/tensorflow_loop.png``.

The step to copy is in ``average_parameters_now_and_then``: the averager is called inside the ``tf.function``.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators
# (TensorFlow has no type hints.)

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import digits
import horovod.tensorflow as hvd
import keras
import options
import tensorflow as tf
from contest import Contest

from hvd_averaging import PeriodicModelAverager, broadcast_parameters

BATCH_SIZE = 16  # of every rank

loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


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
        return self.epochs * (len(self.shard) // BATCH_SIZE)

    def batches(self) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        """The same for all three ways; another order on every rank."""
        seed = self.seed * hvd.size() + hvd.rank()
        for images, labels in self.shard.batches(BATCH_SIZE, self.epochs, seed):
            yield tf.constant(images), tf.constant(labels)

    def model(self) -> keras.Model:
        keras.utils.set_random_seed(self.seed)
        layers = [keras.layers.Dense(256, activation="relu"), keras.layers.Dense(digits.CLASSES)]
        return keras.Sequential([keras.Input((digits.PIXELS,)), *layers])

    def optimizer(self, model: keras.Model) -> keras.optimizers.Optimizer:
        optimizer = keras.optimizers.SGD(learning_rate=0.05, momentum=0.9)
        optimizer.build(model.trainable_variables)
        return optimizer

    def accuracy(self, model: keras.Model) -> Callable[[], float]:
        def accuracy() -> float:
            found = tf.argmax(model(self.test.images), axis=1)
            return float(tf.reduce_mean(tf.cast(found == self.test.labels, tf.float32)))

        return accuracy


def average_gradients_at_every_step(task: Task, contest: Contest) -> None:
    """What Horovod does by itself."""
    model = task.model()
    optimizer = task.optimizer(model)
    broadcast_parameters(model)
    gradient_bytes = sum(4 * int(tf.size(variable)) for variable in model.trainable_variables)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(hvd.grouped_allreduce(gradients, op=hvd.Average), model.trainable_variables)

    with contest.way("gradient averaging", hvd.size(), task.accuracy(model)) as way:
        for images, labels in task.batches():
            step(images, labels)
            way.step(gradient_bytes)


def average_parameters_now_and_then(task: Task, contest: Contest, period: int, warmup_steps: int) -> None:
    """Local SGD: every rank takes its own steps with its own gradients, and in every round takes over the mean."""
    model = task.model()
    optimizer = task.optimizer(model)
    broadcast_parameters(model)
    averager = PeriodicModelAverager(period, warmup_steps)
    weight_bytes = sum(4 * int(tf.size(variable)) for variable in model.trainable_variables)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        averager.average_parameters(model)

    with contest.way("model averaging", hvd.size(), task.accuracy(model)) as way:
        for images, labels in task.batches():
            way_bytes = weight_bytes if averager.due(averager.step) else 0
            step(images, labels)
            way.step(way_bytes)
        done = averager.join(model)  # the steps since the last round count, too
        way.round(done.bytes if done else 0)


def train_alone(task: Task, contest: Contest) -> None:
    """What one rank makes of its own shard in as many steps, the others standing by: what talking has to beat."""
    model = task.model()
    optimizer = task.optimizer(model)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    if hvd.rank() == 0:
        with contest.way("one rank, one shard", 1, task.accuracy(model)) as way:
            for images, labels in task.batches():
                step(images, labels)
                way.step()


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
