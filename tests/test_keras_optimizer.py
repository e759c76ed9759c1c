"""``hvd_averaging.keras.DistributedOptimizer``: gradient averaging, alone and until parameters are averaged."""

from __future__ import annotations

import numpy as np
import pytest
import reference

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

from keras_linear import (  # noqa: E402
    FEATURES,
    RATE,
    Recorder,
    data,
    fit,
    gradient,
    linear_model,
    on_gloo,
    on_ranks,
    weights,
)

from hvd_averaging import PeriodicModelAverager, check_replicas  # noqa: E402
from hvd_averaging.keras import BroadcastCallback, DistributedOptimizer, ModelAveragingCallback  # noqa: E402


def embedding_model():
    """Sparse, dense and missing gradients."""
    tokens = keras.Input((2,), dtype="int64")
    x = keras.layers.Flatten()(keras.layers.Embedding(6, 3)(tokens))
    outputs = keras.layers.Dense(1)(keras.layers.Dense(4, activation="tanh")(x))
    model = keras.Model(tokens, outputs)
    model.unused = model.add_weight(shape=(2,), name="unused", initializer="ones")
    return model


class Dense:
    """Rows that a batch looks up twice: Keras squares their sparse gradients before it adds them up, not after."""

    def apply(self, grads, trainable_variables=None):
        super().apply([grad if grad is None else tf.convert_to_tensor(grad) for grad in grads], trainable_variables)


class DenseAdam(Dense, keras.optimizers.Adam):
    pass


class DenseSGD(Dense, keras.optimizers.SGD):
    pass


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: DenseAdam(0.01),
    "clipped": lambda: DenseSGD(0.1, global_clipnorm=0.05),
    "accumulated": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
}


@pytest.mark.ranks(2, **on_ranks)
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("sgd", {}),
        ("adam", {}),
        ("adam", {"run_eagerly": True}),
        ("clipped", {"steps_per_execution": 3}),
        ("accumulated", {}),
    ],
)
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_averaging_gradients_is_training_on_all_shards_at_once(rank, size, optimizer, options):
    batches, each = 4, 4
    numbers = np.random.default_rng(1)
    tokens = numbers.integers(0, 6, (batches, size, each, 2))
    target = numbers.normal(size=(batches, size, each, 1)).astype(np.float32)

    def trained(optimizer, tokens, target, batch_size):
        keras.utils.set_random_seed(3)
        model = embedding_model()
        model.compile(optimizer, "mse", **options)
        x, y = tokens.reshape(-1, 2), target.reshape(-1, 1)
        model.fit(x, y, batch_size, 2, shuffle=False, verbose=0)
        return weights(model)

    alone = trained(OPTIMIZERS[optimizer](), tokens, target, each * size)
    together = trained(DistributedOptimizer(OPTIMIZERS[optimizer]()), tokens[:, rank], target[:, rank], each)
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2, 4, **on_ranks)
@pytest.mark.parametrize("warmup", [0, 3])
def test_post_local_sgd_switches_at_one_number(rank, size, warmup):
    batches, period = 10, 4
    averager = Recorder(period, warmup)
    optimizer = DistributedOptimizer(keras.optimizers.SGD(RATE, momentum=0.9), averager=averager)
    model = linear_model(optimizer=optimizer)
    model.set_weights([np.full((FEATURES, 1), 0.5, np.float32)])
    fit(model, rank, batches, [ModelAveragingCallback(averager, average_at_train_end=False)])

    replicas, velocities = np.full((size, FEATURES), 0.5), np.zeros((size, FEATURES))
    for step in range(batches):
        gradients = np.stack([gradient(w, each, step, batches) for each, w in enumerate(replicas)])
        gradients = reference.average(gradients) if step < warmup else gradients
        velocities = 0.9 * velocities - RATE * gradients
        replicas = replicas + velocities
        due = step in reference.periodic_rounds(batches, period, warmup)
        replicas = reference.average(replicas) if due else replicas
    assert averager.rounds == reference.periodic_rounds(batches, period, warmup)
    np.testing.assert_allclose(weights(model), replicas[rank], rtol=1e-5)


@pytest.mark.ranks(2, **on_gloo)
def test_16_bit_gradients_are_summed_in_float32(rank):
    for dtype, slope in [("float16", 60000.0), ("bfloat16", 1.0 + rank), ("float64", 1 / 3)]:
        variable = keras.Variable(np.zeros(2), dtype=dtype)
        optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.apply([tf.fill([2], tf.constant(slope, dtype))], [variable])
        expected = 1.5 if dtype == "bfloat16" else slope
        assert np.asarray(variable.numpy(), np.float64).tolist() == [-expected] * 2


@pytest.mark.ranks(2, **on_ranks)
def test_loss_scaling_skips_a_step_on_all_ranks_together(rank):
    optimizer = DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE)))
    model = linear_model(optimizer=optimizer)
    x, y = data(rank, 5)
    y[8 if rank == 1 else slice(0)] = np.inf  # in the third batch of rank 1
    model.fit(x, y, 4, shuffle=False, verbose=0, callbacks=[BroadcastCallback()])
    assert int(model.optimizer.iterations) == 4
    assert check_replicas(model.trainable_variables)
    with pytest.raises(ValueError, match="Turn it around"):
        keras.optimizers.LossScaleOptimizer(DistributedOptimizer(keras.optimizers.SGD()))


@pytest.mark.ranks(2, **on_gloo)
def test_xla_is_turned_off_or_a_clear_error(rank):
    model = linear_model(optimizer=DistributedOptimizer("sgd"), jit_compile=True)
    with pytest.raises(RuntimeError, match=r"compile\(..., jit_compile=False\)"):
        fit(model, rank, 1)
    model = linear_model(optimizer=DistributedOptimizer("sgd"), jit_compile=True)
    fit(model, rank, 1, [BroadcastCallback()])
    assert check_replicas(model.trainable_variables)

    averager = PeriodicModelAverager(2)
    model = linear_model(jit_compile=True)  # averaging parameters leaves the train step to XLA
    fit(model, rank, 3, [ModelAveragingCallback(averager)])
    assert model.jit_compile and check_replicas(model.trainable_variables)


def test_the_optimizer_stays_what_it_was():
    original = keras.optimizers.Adam(0.5)
    optimizer = DistributedOptimizer(original)
    assert optimizer is original and isinstance(optimizer, keras.optimizers.Adam)
    saved = keras.optimizers.serialize(optimizer)
    assert saved == keras.optimizers.serialize(keras.optimizers.Adam.from_config(original.get_config()))
    assert type(keras.optimizers.deserialize(saved)) is keras.optimizers.Adam
    with pytest.raises(ValueError, match="averages gradients already"):
        DistributedOptimizer(optimizer)
    with pytest.raises(TypeError, match="warmup_steps"):
        DistributedOptimizer("sgd", averager=object())
    with pytest.raises(TypeError, match="process_set"):
        DistributedOptimizer("sgd", [0, 1])
