"""Keras ``fit`` with the callbacks and the optimizer of ``hvd_averaging.keras`` (CASES.md, Keras and Counting).

Expected weights come from NumPy (``reference.py``, and the gradient of a linear model) or from Keras in one process.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import reference

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")
if keras.backend.backend() != "tensorflow":
    pytest.skip("Keras runs on another backend here", allow_module_level=True)

from hvd_averaging import (  # noqa: E402
    AveragingError,
    HierarchicalModelAverager,
    LayoutMismatchError,
    PeerError,
    PeriodicModelAverager,
    StepMismatchError,
    averaged,
    check_replicas,
    process_sets,
)
from hvd_averaging.keras import (  # noqa: E402
    BroadcastCallback,
    DistributedOptimizer,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    ModelAveragingCallback,
    StopTogetherCallback,
)

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


# What `fit` with averaging does


@pytest.mark.ranks(2, 4, **on_ranks)
@pytest.mark.parametrize("kind", ["sequential", "functional"])
def test_fit_is_local_sgd(rank, size, kind):
    batches, period, warmup = 10, 3, 2
    model = linear_model(kind)
    model.set_weights([np.full((FEATURES, 1), rank, np.float32)])
    start = gathered(weights(model), size)

    averager = Recorder(period, warmup)
    fit(model, rank, batches, [ModelAveragingCallback(averager, average_at_train_end=False)])

    expected = reference.local_sgd(start, batches, period, sgd_steps(batches), warmup)[-1]
    assert averager.rounds == reference.periodic_rounds(batches, period, warmup)
    np.testing.assert_allclose(weights(model), expected[rank], rtol=1e-5)


@pytest.mark.ranks(2, 4, **on_ranks)
@pytest.mark.parametrize("kind", ["sequential", "subclassed"])
def test_broadcast_and_averaging_in_either_order_give_the_same_weights(rank, size, kind):
    batches, results = 5, []
    for order in (1, -1):
        keras.utils.set_random_seed(100 + rank)
        model = linear_model(kind)
        averager = PeriodicModelAverager(2, name=f"order {order}")
        fit(model, rank, batches, [BroadcastCallback(), ModelAveragingCallback(averager)][::order])
        results.append(weights(model))
    np.testing.assert_array_equal(results[0], results[1])

    keras.utils.set_random_seed(100)
    root = linear_model(kind)
    root(np.zeros((1, FEATURES), np.float32))
    replicas, local = np.tile(weights(root).astype(np.float64), (size, 1)), sgd_steps(batches)
    if kind == "subclassed":  # equal only after the first batch, which has built the model
        replicas = np.tile(local(0, replicas)[0], (size, 1))
    for step in range(1 if kind == "subclassed" else 0, batches):
        replicas = local(step, replicas)
        replicas = reference.average(replicas) if step % 2 == 0 else replicas
    np.testing.assert_allclose(results[0], reference.average(replicas)[0], rtol=1e-5)


@pytest.mark.ranks(2, **on_ranks)
def test_validation_and_epoch_end_see_the_mean(rank, size):
    batches = 3
    model = linear_model()
    model.set_weights([np.full((FEATURES, 1), rank, np.float32)])
    replicas = gathered(weights(model), size)
    for step in range(batches):
        replicas = sgd_steps(batches)(step, replicas)
    x, y = data(99, 2)
    mean = reference.average(replicas)[0]

    at_epoch_end = []
    averaging = ModelAveragingCallback(PeriodicModelAverager(100, 50), average_at_epoch_end=True)
    record = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: at_epoch_end.append(weights(model)))
    history = fit(model, rank, batches, [averaging, record], validation_data=(x, y)).history

    np.testing.assert_allclose(at_epoch_end[0], mean, rtol=1e-5)
    np.testing.assert_allclose(history["val_loss"][0], np.mean((x @ mean - y[:, 0]) ** 2), rtol=1e-5)
    assert averaging.last_round.ranks == size


@pytest.mark.ranks(2, **on_gloo)
def test_training_ends_with_the_mean_unless_told_otherwise(rank, size):
    for at_end in (True, False):
        model = linear_model()
        model.set_weights([np.full((FEATURES, 1), rank, np.float32)])
        averager = PeriodicModelAverager(100, 50, name=f"{at_end}")
        fit(model, rank, 3, [ModelAveragingCallback(averager, average_at_train_end=at_end)])
        assert bool(check_replicas(model.trainable_variables)) is at_end
    own = weights(model)
    with averaged(model):
        np.testing.assert_allclose(weights(model), gathered(own, size).mean(0), rtol=1e-6)
    np.testing.assert_array_equal(weights(model), own)


@pytest.mark.ranks(2, **on_gloo)
def test_only_the_given_variables_are_averaged(rank):
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    first, second = model.layers
    fit(model, rank, 2, [ModelAveragingCallback(PeriodicModelAverager(2), first)])
    assert check_replicas(first.trainable_variables)
    assert not check_replicas(second.trainable_variables)


@pytest.mark.ranks(4, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}, **on_gloo)
def test_on_four_ranks_pairs_may_average_among_themselves(rank, size):
    pairs = process_sets.by_size(2)
    model = linear_model()
    fit(model, rank, 4, [BroadcastCallback(), ModelAveragingCallback(PeriodicModelAverager(2, process_set=pairs))])
    replicas = gathered(weights(model), size)
    np.testing.assert_array_equal(replicas[0], replicas[1])
    np.testing.assert_array_equal(replicas[2], replicas[3])
    assert not np.array_equal(replicas[0], replicas[2])


# Counting


@pytest.mark.ranks(2, 4, **on_ranks)
@pytest.mark.parametrize(("batches", "epochs", "per_execution"), [(32, 1, 4), (16, 2, 4), (16, 2, 1)])
def test_the_count_is_of_optimizer_steps(rank, batches, epochs, per_execution):
    averager = Recorder(period=4)
    model = linear_model(steps_per_execution=per_execution)
    fit(model, rank, batches, [ModelAveragingCallback(averager)], epochs, batch_size=2)
    assert (len(averager.rounds), averager.step) == (8, 32)
    assert averager.rounds == reference.periodic_rounds(32, 4)


@pytest.mark.ranks(2, 4, **on_ranks)
def test_the_count_goes_on_over_epochs_whose_length_the_period_does_not_divide(rank):
    averager = Recorder(period=4)
    fit(linear_model(), rank, 6, [ModelAveragingCallback(averager)], epochs=2)
    assert averager.rounds == [0, 4, 8]


@pytest.mark.ranks(2, 4, **on_ranks)
def test_accumulated_gradients_are_one_step(rank):
    averager, when = Recorder(period=3, warmup_steps=2), []
    optimizer = keras.optimizers.SGD(RATE, gradient_accumulation_steps=4)
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: when.append(len(averager.rounds)))
    fit(linear_model(optimizer=optimizer), rank, 24, [ModelAveragingCallback(averager), watch], batch_size=1)
    assert averager.rounds == [2, 5]
    assert when.index(1) + 1 == 12  # micro-batches up to the first round


@pytest.mark.ranks(2, 4, **on_ranks)
@pytest.mark.parametrize("loaded_on", ["every rank", "rank 0"])
def test_resuming_goes_on_with_the_same_rounds(rank, loaded_on, tmp_path):
    unbroken = Recorder(period=3, warmup_steps=5, name="unbroken")
    fit(linear_model(), rank, 14, [ModelAveragingCallback(unbroken)])

    model = linear_model(optimizer=keras.optimizers.SGD(RATE, momentum=0.9))
    first = Recorder(period=3, warmup_steps=5, name="first")
    fit(model, rank, 7, [ModelAveragingCallback(first)])
    model.save(tmp_path / "model.keras")
    callbacks = []
    if loaded_on == "every rank" or rank == 0:
        model = keras.models.load_model(tmp_path / "model.keras")
    else:
        model = linear_model(optimizer=keras.optimizers.SGD(RATE, momentum=0.9))
        callbacks = [BroadcastCallback()]
    if loaded_on == "rank 0":
        callbacks = [BroadcastCallback()]
    second = Recorder(period=3, warmup_steps=5, name="second")
    fit(model, rank, 7, [ModelAveragingCallback(second), *callbacks])
    assert first.rounds + second.rounds == unbroken.rounds == [5, 8, 11]
    assert second.step == 14


@pytest.mark.ranks(2, **on_gloo)
@pytest.mark.parametrize("order", [1, -1])
def test_the_count_of_the_root_is_there_before_the_first_batch_builds_the_model(rank, order):
    model, averager = linear_model("subclassed"), Recorder(period=4)
    model.optimizer.iterations.assign(7 if rank == 0 else 0)
    fit(model, rank, 6, [BroadcastCallback(), ModelAveragingCallback(averager)][::order])
    assert (averager.rounds, averager.step, int(model.optimizer.iterations)) == ([8, 12], 13, 13)


@pytest.mark.ranks(2, **on_gloo)
def test_optimizers_at_different_steps_are_an_error_before_the_first_batch(rank):
    model = linear_model()
    model.optimizer.iterations.assign(7 * rank)
    with pytest.raises(StepMismatchError, match="rank 0 at step 0, rank 1 at step 7.*BroadcastCallback"):
        fit(model, rank, 2, [ModelAveragingCallback(PeriodicModelAverager(2))])
    assert int(model.optimizer.iterations) == 7 * rank


@pytest.mark.ranks(2, **on_gloo)
def test_a_count_that_the_optimizer_does_not_share_is_a_warning(rank):
    averager = PeriodicModelAverager(2)
    averager.load_state_dict({"step": 7})
    with pytest.warns(UserWarning, match="has counted 7 steps, but the optimizer 0"):
        fit(linear_model(), rank, 2, [ModelAveragingCallback(averager)])


@pytest.mark.ranks(2, 4, **on_ranks)
@pytest.mark.parametrize("per_execution", [1, 4])
def test_a_step_skipped_by_loss_scaling_on_one_rank_is_counted_all_the_same(rank, per_execution):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((FEATURES,))
    outputs = keras.layers.Dense(1, use_bias=False, dtype="mixed_float16")(inputs)
    model = keras.Model(inputs, outputs)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE), initial_scale=2.0)
    model.compile(optimizer, "mse", steps_per_execution=per_execution)
    x, y = data(rank, 10)
    if rank == 1:
        y[8] = np.inf  # in the third batch
    averager = Recorder(period=3, warmup_steps=1)
    averaging = ModelAveragingCallback(averager)
    for _ in range(2):
        model.fit(x, y, 4, shuffle=False, verbose=0, callbacks=[averaging])
    assert int(model.optimizer.iterations) == (18 if rank == 1 else 20)
    assert averager.step == 20
    assert len(averager.rounds) == (7 if per_execution == 1 else 5)  # executions of 4, 4, 2 batches
    assert check_replicas(model.trainable_variables)
    assert np.isfinite(weights(model)).all()


@pytest.mark.ranks(2, **on_ranks)
def test_ranks_may_have_different_numbers_of_batches(rank):
    model, averager = linear_model(), Recorder(period=5)
    callbacks = [BroadcastCallback(), ModelAveragingCallback(averager, average_at_epoch_end=True)]
    for _ in range(2):
        fit(model, rank, 10 + rank, callbacks, epochs=2)
    assert averager.step == 44
    assert check_replicas(model.trainable_variables)


# All kinds of layers


def text_model():
    """Layers that hold more than weights."""
    tokens = keras.Input((4,), dtype="int64")
    x = keras.layers.Embedding(7, 5)(tokens)
    x = keras.layers.LSTM(4, dropout=0.2)(x)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dropout(0.3)(x)
    return keras.Model(tokens, keras.layers.Dense(1)(x))


@pytest.mark.ranks(2, **on_ranks)
def test_layers_with_state_of_their_own(rank, size):
    keras.utils.set_random_seed(rank)
    model = text_model()
    model.compile("adam", "mse")
    numbers = np.random.default_rng(rank)
    tokens, target = numbers.integers(0, 7, (24, 4)), numbers.normal(size=(24, 1))
    seeds = [variable for variable in model.variables if "seed" in variable.path]
    assert seeds
    averaging = ModelAveragingCallback(PeriodicModelAverager(3))
    starts = []
    start = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: starts.append(check_replicas(model.weights))
    )
    model.fit(tokens, target, 4, 1, verbose=0, callbacks=[BroadcastCallback(), averaging, start])
    assert starts[0]
    assert check_replicas(model.trainable_variables)
    assert len(np.unique(gathered(seeds[0].numpy(), size), axis=0)) == size
    moving = next(variable for variable in model.weights if "moving_mean" in variable.path)
    assert len(np.unique(gathered(moving.numpy(), size), axis=0)) == size  # not trainable, so each rank's own


@pytest.mark.ranks(2, **on_gloo)
def test_what_preprocessing_layers_learned_stays(rank):
    normalization = keras.layers.Normalization()
    normalization.adapt(np.array([[1.0 + rank] * FEATURES, [3.0 + rank] * FEATURES], np.float32))
    lookup = keras.layers.StringLookup(vocabulary=["a", "b"] if rank == 0 else ["c", "d"])
    inputs, words = keras.Input((FEATURES,)), keras.Input((1,), dtype="string")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(4, 2)(lookup(words)))
    joined = keras.layers.Concatenate()([normalization(inputs), embedded])
    model = keras.Model([inputs, words], keras.layers.Dense(1)(joined))
    model.compile("sgd", "mse")
    x, y = data(rank, 2)
    strings = tf.constant([["a"], ["c"]] * (len(x) // 2))
    dataset = tf.data.Dataset.from_tensor_slices(((x, strings), y)).batch(4)
    model.fit(dataset, verbose=0, callbacks=[ModelAveragingCallback(PeriodicModelAverager(2))])
    assert check_replicas(model.trainable_variables)
    np.testing.assert_allclose(np.ravel(normalization.mean), 2 + rank)
    assert lookup.get_vocabulary()[1:] == (["a", "b"] if rank == 0 else ["c", "d"])


@pytest.mark.ranks(2, **on_ranks)
def test_broadcast_brings_the_optimizer_of_the_root(rank):
    model = linear_model(optimizer=keras.optimizers.Adam(RATE * (1 + rank)))
    if rank == 1:  # the root: trained before, so that its optimizer has slots already
        fit(model, rank, 3)
    state = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: state.append(
            (int(model.optimizer.iterations), float(model.optimizer.learning_rate.numpy()))
        )
    )
    equal = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: state.append(check_replicas([*model.weights, *model.optimizer.variables]))
    )
    broadcast = BroadcastCallback(root_rank=1)
    fit(model, rank, 1, [broadcast, equal, record])
    assert state[0]
    assert state[1] == (3, pytest.approx(2 * RATE))
    before = weights(model)  # each rank's own again
    begin = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: state.append(weights(model)))
    fit(model, rank, 1, [broadcast, begin])
    np.testing.assert_array_equal(state[-1], before)  # a second `fit` goes on from there


# Models that leave the job


LOAD = """
    import sys
    for blocked in ("hvd_averaging", "horovod"):
        sys.modules[blocked] = None
    import numpy as np, keras, tensorflow as tf
    folder = sys.argv[1]
    x = np.load(f"{folder}/x.npy")
    model = keras.models.load_model(f"{folder}/model.keras")
    assert type(model.optimizer) is keras.optimizers.SGD and int(model.optimizer.iterations) == 5
    bare = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
    bare.load_weights(f"{folder}/model.weights.h5")
    exported = tf.saved_model.load(f"{folder}/exported")
    for result in (model.predict(x, verbose=0), bare(x), exported.serve(x)):
        np.testing.assert_allclose(result, np.load(f"{folder}/y.npy"), rtol=1e-6)
    model.fit(x, x[:, :1], verbose=0)
"""


@pytest.mark.ranks(2, 4, **on_ranks)
def test_what_is_saved_at_step_5_loads_without_this_package(rank, tmp_path):
    averager = PeriodicModelAverager(period=4, warmup_steps=1)
    model = linear_model(optimizer=DistributedOptimizer(keras.optimizers.SGD(RATE, momentum=0.9), averager=averager))
    fit(model, rank, 5, [BroadcastCallback(), ModelAveragingCallback(averager)])
    if rank == 0:
        x = data(7, 1)[0]
        np.save(tmp_path / "x.npy", x)
        np.save(tmp_path / "y.npy", model.predict(x, verbose=0))
        model.save(tmp_path / "model.keras")
        model.save_weights(tmp_path / "model.weights.h5")
        model.export(tmp_path / "exported", verbose=False)
        command = [sys.executable, "-c", textwrap.dedent(LOAD), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50)
        assert done.returncode == 0, done.stderr


# Ranks that differ


@pytest.mark.ranks(2, 4, **on_ranks)
@pytest.mark.parametrize("together", ["averaged metrics", "agreement"])
def test_when_one_rank_stops_early_all_stop(rank, together):
    model = linear_model()
    worse = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: logs.update(watched=float(epoch if rank == 1 and epoch >= 2 else -epoch))
    )
    stopping = keras.callbacks.EarlyStopping("watched", patience=0, mode="min")
    callbacks = {
        "averaged metrics": [worse, MetricAverageCallback(), stopping],
        "agreement": [worse, stopping, StopTogetherCallback()],
    }[together]
    history = fit(model, rank, 3, [ModelAveragingCallback(PeriodicModelAverager(2)), *callbacks], epochs=6)
    # Rank 1 sees 0, -1, 2 and the others 0, -1, -2: the third mean is 0 on two ranks, -1 on four, no better than -1.
    assert history.epoch == [0, 1, 2]
    assert check_replicas(model.trainable_variables)


@pytest.mark.ranks(2, **on_gloo)
def test_a_decision_to_stop_after_the_agreement_is_an_error(rank):
    stopping = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", True))
    model = linear_model()
    with pytest.raises(AveragingError, match="Put StopTogetherCallback after EarlyStopping"):
        fit(model, rank, 1, [StopTogetherCallback(), stopping], epochs=2)


@pytest.mark.ranks(2, 4, **on_ranks)
def test_other_callbacks_on_another_rank_are_an_error_at_the_start(rank):
    callbacks = [BroadcastCallback(), ModelAveragingCallback(PeriodicModelAverager(2, rank))]
    model = linear_model()
    with pytest.raises(LayoutMismatchError, match="rank 0: ModelAv.*warmup_steps=0.*rank 1: Broadcast.*same order"):
        fit(model, rank, 2, callbacks[:: -1 if rank == 0 else 1])
    with pytest.raises(LayoutMismatchError, match=r"rank 0: .*warmup_steps=0.*rank 1: .*warmup_steps=1"):
        fit(model, rank, 2, callbacks)
    assert int(model.optimizer.iterations) == 0


@pytest.mark.ranks(2, **on_gloo)
def test_a_model_that_is_not_compiled(rank):
    def begin(model):
        callbacks = [ModelAveragingCallback(PeriodicModelAverager(2))]
        keras.callbacks.CallbackList(callbacks, model=model).on_train_begin()

    bare = keras.Sequential([keras.Input((FEATURES,)), linear_layer()])
    with pytest.raises(ValueError, match="needs a compiled model: call model.compile"):
        begin(bare)
    with pytest.raises(ValueError if rank == 0 else PeerError, match="compile" if rank == 0 else "rank 0"):
        begin(bare if rank == 0 else linear_model())


@pytest.mark.ranks(2, **on_gloo)
def test_models_that_differ_are_an_error_before_the_first_batch(rank):
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1, use_bias=rank == 1)])
    model.compile("sgd", "mse")
    with pytest.raises(LayoutMismatchError, match="bias"):
        fit(model, rank, 2, [BroadcastCallback()])


def test_wrong_arguments_are_refused_where_they_are_made():
    with pytest.raises(TypeError, match="averager is a int"):
        ModelAveragingCallback(4)
    with pytest.raises(ValueError, match="start_timeout"):
        BroadcastCallback(start_timeout=0)
    with pytest.raises(ValueError, match="must be positive"):
        LearningRateWarmupCallback(0.0)
    with pytest.raises(TypeError, match="process_set"):
        MetricAverageCallback([0, 1])


ALONE = """
    import time, numpy as np, keras
    import horovod.tensorflow as hvd
    from hvd_averaging import PeriodicModelAverager
    from hvd_averaging.keras import ModelAveragingCallback
    hvd.init()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    averaging = ModelAveragingCallback(PeriodicModelAverager(2), start_timeout=2)
    model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0, callbacks=[averaging] if hvd.rank() == 0 else [])
    time.sleep(6 * hvd.rank())
"""


def test_a_callback_on_one_rank_only_is_an_error_at_the_start(horovodrun):
    done = horovodrun(2, textwrap.dedent(ALONE), framework="tensorflow")
    said = " ".join(re.sub(r"\[[\d,]+\]<std(out|err)>:", "", done.output).split())
    assert done.returncode != 0
    assert "rank 0 has waited 2 s at the start of training for rank 1 to start" in said
    assert "Give the callback to every rank" in said


# Metrics and learning rate


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


# The optimizer


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
    for dtype, gradient in [("float16", 60000.0), ("bfloat16", 1.0 + rank), ("float64", 1 / 3)]:
        variable = keras.Variable(np.zeros(2), dtype=dtype)
        optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.apply([tf.fill([2], tf.constant(gradient, dtype))], [variable])
        expected = 1.5 if dtype == "bfloat16" else gradient
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


TORCH = """
    import numpy as np, torch, keras
    import horovod.torch as hvd
    from hvd_averaging import PeriodicModelAverager, check_replicas
    from hvd_averaging.keras import *
    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    callbacks = [
        BroadcastCallback(), ModelAveragingCallback(PeriodicModelAverager(2), average_at_epoch_end=True),
        MetricAverageCallback(), LearningRateWarmupCallback(0.1), StopTogetherCallback(),
    ]
    numbers = np.random.default_rng(hvd.rank())
    x = numbers.normal(size=(20, 3)).astype("float32")
    history = model.fit(x, x[:, :1], 4, 2, verbose=0, callbacks=callbacks).history
    assert check_replicas(model), check_replicas(model)
    import sys
    assert "horovod.tensorflow" not in sys.modules
    print("loss", history["loss"][-1])
"""


def test_callbacks_on_the_torch_backend(horovodrun):
    done = horovodrun(2, textwrap.dedent(TORCH), env={"KERAS_BACKEND": "torch"})
    assert done.returncode == 0, done.output
    losses = re.findall(r"loss ([\d.]+)", done.output)
    assert len(losses) == 2 and len(set(losses)) == 1


@pytest.mark.ranks(2, framework="tensorflow", backends=("gloo",))
def test_a_hierarchy_ends_the_training_with_a_round(rank):
    model = linear_model()
    averager = HierarchicalModelAverager({2: 1, 100: 2}, timeout=20)
    averaging = ModelAveragingCallback(averager, average_at_epoch_end=True)
    fit(model, rank, 3, [BroadcastCallback(), averaging], epochs=2)
    assert check_replicas(model.weights) and averager.step == 6 and averaging.last_round.ranks == 2


@pytest.mark.ranks(2, framework="tensorflow", backends=("gloo",))
def test_a_layer_with_plain_numbers_called_like_statistics(rank):
    layer = keras.layers.Dense(1)
    layer.build((None, 2))
    layer.moving_mean, layer.moving_variance = 0.0, 1.0
    layer.bias.assign([float(rank)])
    PeriodicModelAverager(2, buffers="average", timeout=20).average_parameters(layer)
    assert layer.bias.numpy() == 0.5
