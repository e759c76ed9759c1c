"""A linear model in Keras whose training NumPy can follow, for the tests of ``hvd_averaging.keras``."""

from __future__ import annotations

import numpy as np
import pytest

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")
if keras.backend.backend() != "tensorflow":
    pytest.skip("Keras runs on another backend here", allow_module_level=True)

from hvd_averaging import PeriodicModelAverager  # noqa: E402

on_ranks = {"framework": "tensorflow", "limit": 60}
on_gloo = {**on_ranks, "backends": ["gloo"]}  # where nothing depends on how messages travel
RATE = 0.1
FEATURES = 3


class Recorder(PeriodicModelAverager):
    """Remembers the steps of its rounds."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.rounds = []

    def average_parameters(self, params, *, steps=1):
        done = super().average_parameters(params, steps=steps)
        self.rounds += [done.step] if done else []
        return done


class Subclassed(keras.Model):
    """Has no weights before its first batch."""

    def __init__(self):
        super().__init__()
        self.dense = linear_layer()

    def call(self, inputs):
        return self.dense(inputs)


def linear_layer():
    return keras.layers.Dense(1, use_bias=False)


def linear_model(kind="sequential", optimizer=None, **options):
    """``x @ w``, whose gradient NumPy knows."""
    if kind == "sequential":
        model = keras.Sequential([keras.Input((FEATURES,)), linear_layer()])
    elif kind == "functional":
        inputs = keras.Input((FEATURES,))
        model = keras.Model(inputs, linear_layer()(inputs))
    else:
        model = Subclassed()
    model.compile(optimizer or keras.optimizers.SGD(RATE), "mse", **options)
    return model


def data(rank, batches, batch_size=4):
    """Another shard for every rank: ``x``, ``y``, in the order in which they are trained on."""
    numbers = np.random.default_rng(rank)
    x = numbers.normal(size=(batches * batch_size, FEATURES)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 0.5], np.float32) + 0.1 * numbers.normal(size=len(x))).astype(np.float32)
    return x, y[:, None]


def fit(model, rank, batches, callbacks=(), epochs=1, batch_size=4, **options):
    x, y = data(rank, batches, batch_size)
    return model.fit(
        x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks), **options
    )


def gradient(weights, rank, step, batches, batch_size=4):
    x, y = data(rank, batches, batch_size)
    rows = slice(step % batches * batch_size, (step % batches + 1) * batch_size)
    x, y = x[rows].astype(np.float64), y[rows, 0].astype(np.float64)
    return 2 * x.T @ (x @ weights - y) / batch_size


def sgd_steps(batches):
    """One SGD step of every rank on its own shard, for ``reference.local_sgd``."""

    def local(step, replicas):
        return np.stack([w - RATE * gradient(w, rank, step, batches) for rank, w in enumerate(replicas)])

    return local


def weights(model):
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()])


def gathered(vector, size):
    import horovod.tensorflow as hvd

    return hvd.allgather(tf.constant(np.asarray(vector, np.float64)[None]), name="test.gathered").numpy()
