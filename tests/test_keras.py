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

from keras_linear import (  # noqa: E402
    FEATURES,
    RATE,
    Recorder,
    data,
    fit,
    gathered,
    linear_layer,
    linear_model,
    on_gloo,
    on_ranks,
    sgd_steps,
    weights,
)

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


@pytest.mark.ranks(2, **on_gloo)
def test_a_hierarchy_ends_the_training_with_a_round(rank):
    model = linear_model()
    averager = HierarchicalModelAverager({2: 1, 100: 2}, timeout=20)
    averaging = ModelAveragingCallback(averager, average_at_epoch_end=True)
    fit(model, rank, 3, [BroadcastCallback(), averaging], epochs=2)
    assert check_replicas(model.weights) and averager.step == 6 and averaging.last_round.ranks == 2


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


@pytest.mark.ranks(2, **on_gloo)
def test_a_layer_with_plain_numbers_called_like_statistics(rank):
    layer = keras.layers.Dense(1)
    layer.build((None, 2))
    layer.moving_mean, layer.moving_variance = 0.0, 1.0
    layer.bias.assign([float(rank)])
    PeriodicModelAverager(2, buffers="average", timeout=20).average_parameters(layer)
    assert layer.bias.numpy() == 0.5


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


# Other backends


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
