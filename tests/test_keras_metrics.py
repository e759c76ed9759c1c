"""Metrics and the learning rate in Keras ``fit``: ``MetricAverageCallback`` and ``LearningRateWarmupCallback``."""

from __future__ import annotations

import numpy as np
import pytest

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

from keras_linear import (  # noqa: E402
    FEATURES,
    RATE,
    fit,
    gathered,
    gradient,
    linear_model,
    on_gloo,
    on_ranks,
    weights,
)

from hvd_averaging import LayoutMismatchError  # noqa: E402
from hvd_averaging.keras import LearningRateWarmupCallback, MetricAverageCallback  # noqa: E402


@pytest.mark.ranks(2, **on_ranks)
def test_metrics_are_averaged_in_place(rank, size):
    logs = {"b": 0.1 * rank, "a": tf.constant(float(rank)), "each": np.array([rank, -1.0]), "text": f"rank {rank}"}
    callback = MetricAverageCallback()
    callback.on_epoch_end(0, logs)
    mean = np.mean(range(size))
    assert logs["b"] == np.mean([0.1 * each for each in range(size)])
    assert (logs["a"], logs["each"].tolist(), logs["text"]) == (mean, [mean, -1.0], f"rank {rank}")
    callback.on_epoch_end(1, {})

    lacking = {"loss": 1.0, "val_loss": 2.0} if rank == size - 1 else {"loss": 1.0}
    with pytest.raises(LayoutMismatchError, match=rf"rank 0: loss; .*rank {size - 1}: loss, val_loss.*validation"):
        callback.on_epoch_end(2, lacking)


@pytest.mark.ranks(2, **on_gloo)
def test_the_history_holds_the_mean_of_the_metrics(rank, size):
    own, model = [], linear_model()
    record = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: own.append(logs["loss"]))
    history = fit(model, rank, 2, [record, MetricAverageCallback()], epochs=2).history
    assert history["loss"] == pytest.approx(gathered(own, size).mean(0).tolist(), rel=1e-12)


@pytest.mark.ranks(2, **on_gloo)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_learning_rate_warmup(rank, size, momentum):
    batches, epochs = 4, 3
    model = linear_model(optimizer=keras.optimizers.SGD(1.0, momentum=momentum))
    model.set_weights([np.full((FEATURES, 1), rank, np.float32)])
    rates = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates.append(float(model.optimizer.learning_rate.numpy()))
    )
    warmup = LearningRateWarmupCallback(RATE, warmup_epochs=2)
    history = fit(model, rank, batches, [warmup, record], epochs).history
    expected = [RATE / size * (1 + min(1, (step + 1) / 8) * (size - 1)) for step in range(batches * epochs)]
    assert rates == pytest.approx(expected)
    assert history["learning_rate"] == pytest.approx(expected[3::4])

    w, velocity = np.full(FEATURES, float(rank)), np.zeros(FEATURES)
    for step, rate in enumerate(expected):  # Goyal et al., equation 9: the velocity is of gradients, not of steps
        velocity = momentum * velocity + gradient(w, rank, step, batches)
        w = w - rate * velocity
    np.testing.assert_allclose(weights(model), w, rtol=1e-4)


@pytest.mark.ranks(2, **on_gloo)
def test_learning_rate_warmup_refuses_a_schedule(rank):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    with pytest.raises(ValueError, match="schedule of its own"):
        fit(linear_model(optimizer=keras.optimizers.SGD(schedule)), rank, 2, [LearningRateWarmupCallback(0.1)])
