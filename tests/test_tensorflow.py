"""The same averager for TensorFlow variables and Keras models, eager and inside ``tf.function``."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import weakref

import numpy as np
import pytest
import reference

tf = pytest.importorskip("tensorflow")

from hvd_averaging import (  # noqa: E402
    AveragingError,
    LayoutMismatchError,
    ModelAverager,
    PeerError,
    PeriodicModelAverager,
    StepMismatchError,
    average_parameters,
    averaged,
    broadcast_parameters,
    check_replicas,
)

on_ranks = {"framework": "tensorflow", "limit": 60}
on_gloo = {**on_ranks, "backends": ("gloo",)}  # what goes on within a rank is the same on Open MPI


def variable(value, shape=(2,), **options):
    return tf.Variable(tf.fill(shape, float(value)), **options)


def dense_model(rank, units=3):
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(units), keras.layers.Dense(1)])
    for weight in model.trainable_variables:
        weight.assign(tf.fill(weight.shape, float(rank)))
    return model


class Module(tf.Module):
    def __init__(self, rank):
        super().__init__()
        self.first = variable(rank)
        self.frozen = variable(rank, trainable=False)
        self.inner = [variable(10.0 * rank, (2, 3))]


@pytest.mark.parametrize(("framework", "other"), [("tensorflow", "torch"), ("torch", "tensorflow")])
def test_one_framework_does_not_import_the_other(framework, other):
    check = f"""
        import sys, {framework}
        from hvd_averaging import average_parameters
        from hvd_averaging.{framework} import PeriodicModelAverager
        try:
            average_parameters([1.0])
        except TypeError:
            print("{other}" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(check)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.ranks(2, **on_gloo)
@pytest.mark.parametrize(
    "form",
    [
        lambda model: model,
        lambda model: model.trainable_variables,
        lambda model: [weight.value for weight in model.trainable_variables],
        lambda model: iter(model.trainable_variables),
        # Not by path: Keras numbers layers by what the process has built before.
        lambda model: dict(zip("abcd", model.trainable_variables, strict=True)),
        lambda model: list(zip("abcd", model.trainable_variables, strict=True)),
    ],
    ids=["model", "keras", "tf", "iterator", "dict", "pairs"],
)
def test_every_way_to_pass_variables(rank, form):
    model = dense_model(rank)
    done = average_parameters(form(model))
    assert (done.tensors, done.ranks, done.bytes) == (4, 2, 4 * 13)
    assert all((weight.numpy() == 0.5).all() for weight in model.trainable_variables)


@pytest.mark.ranks(2, 4, **on_ranks)
def test_a_tf_module(rank, size):
    module = Module(rank)
    assert average_parameters(module).tensors == 2
    mean = (size - 1) / 2
    assert (module.first.numpy()[0], module.inner[0].numpy()[0, 0], module.frozen.numpy()[0]) == (mean, 10 * mean, rank)


@pytest.mark.ranks(2, **on_gloo)
def test_names_do_not_depend_on_what_else_a_rank_has_built(rank):
    for _ in range(rank):
        dense_model(rank)
    assert average_parameters(dense_model(rank)).tensors == 4


@pytest.mark.ranks(2, **on_ranks)
def test_frozen_layers_and_integers_are_left_alone(rank):
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.BatchNormalization()])
    model.layers[0].trainable = False
    for weight in model.variables:
        weight.assign(tf.fill(weight.shape, float(rank)))
    assert average_parameters(model).tensors == 2
    assert average_parameters([model.layers[0].kernel, model.layers[1].gamma]).tensors == 1
    assert model.layers[0].kernel.numpy()[0, 0] == rank
    assert model.layers[1].moving_mean.numpy()[0] == rank
    counter = tf.Variable(rank)
    assert average_parameters([counter, variable(rank)]).tensors == 1
    assert counter.numpy() == rank


@pytest.mark.ranks(2, 4, **on_ranks)
def test_dtypes_and_shapes(rank, size):
    floats = [tf.Variable(1.0 + rank, dtype=dtype) for dtype in ("bfloat16", "float16", "float32", "float64")]
    large = tf.Variable(tf.fill([3], 60000.0), dtype=tf.float32)
    half = tf.Variable(tf.cast(large, tf.float16))
    pairs = tf.Variable(tf.complex([[1.0 * rank]], [[-2.0 * rank]]))
    empty = tf.Variable(tf.zeros([0, 3]))
    average_parameters([*floats, half, pairs, empty])
    mean = (size - 1) / 2
    assert [float(v.numpy()) for v in floats] == [1 + mean] * 4
    assert [v.dtype.name for v in floats] == ["bfloat16", "float16", "float32", "float64"]
    assert (half.numpy() == 60000).all()
    assert pairs.numpy()[0, 0] == complex(mean, -2 * mean)
    assert empty.shape == (0, 3)


@pytest.mark.ranks(2, 4, **on_ranks)
def test_identical_replicas_stay_bit_for_bit(rank):
    values = np.random.default_rng(3).normal(size=1000).astype(np.float32) * 1e-5
    weights = tf.Variable(values)
    average_parameters([weights])
    assert (weights.numpy() == values).all()


@pytest.mark.ranks(2, **on_gloo)
@pytest.mark.parametrize("bucket_bytes", [4, 40, 1000])
@pytest.mark.filterwarnings("ignore:With period=1")
def test_any_bucket_size_gives_the_same(rank, bucket_bytes):
    def variables():
        generator = np.random.default_rng(rank)
        shapes = ((7, 5), (3,), (), (2, 0))
        made = [tf.Variable(generator.normal(size=shape).astype(np.float32)) for shape in shapes]
        return [*made, tf.Variable(generator.normal(size=(3, 2)) * (1 + 2j))]

    whole, cut = variables(), variables()
    average_parameters(whole)
    PeriodicModelAverager(1, bucket_bytes=bucket_bytes).average_parameters(cut)
    assert all((one.numpy() == other.numpy()).all() for one, other in zip(whole, cut, strict=True))


@pytest.mark.ranks(2, **on_ranks)
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("other", [{"shape": (5,)}, {"dtype": tf.float64}])
def test_another_shape_or_dtype_is_an_error_on_both(rank, position, other):
    variables = [variable(rank) for _ in range(3)]
    if rank == 1:
        variables[position] = tf.Variable(tf.ones(other.get("shape", (2,)), other.get("dtype", tf.float32)))
    with pytest.raises(LayoutMismatchError, match=f"parameter number {position}: rank 0: '{position}' .*; rank 1: "):
        average_parameters(variables)
    assert variables[(position + 1) % 3].numpy()[0] == rank


@pytest.mark.ranks(2, **on_gloo)
def test_what_cannot_be_averaged_is_refused_by_name(rank):
    import keras

    unbuilt = keras.Sequential([keras.layers.Dense(3)])
    for params, error, says in [
        ([tf.constant(1.0)], TypeError, "'0' is a tf.Tensor"),
        (unbuilt, ValueError, "no variables yet"),
        ([tf.Variable([1.0], shape=[None])], ValueError, "fixed"),
        (3.5, TypeError, "model.parameters"),
    ]:
        with pytest.raises((error, PeerError), match=says if rank == 1 else "rank 1 could not take part"):
            average_parameters(params if rank == 1 else [variable(rank)])
    with pytest.raises(TypeError, match="holds strings"):
        check_replicas([tf.Variable("text")])


@pytest.mark.ranks(2, **on_gloo)
def test_torch_and_tensorflow_do_not_mix(rank):
    import torch

    with pytest.raises(TypeError, match="'0' of tensorflow and '1' of torch"):
        average_parameters([variable(rank), torch.ones(2)])


@pytest.mark.ranks(2, 4, **on_ranks)
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize(("period", "warmup_steps"), [(2, 0), (3, 4)])
def test_every_step_follows_the_reference(rank, size, period, warmup_steps, in_graph):
    start = np.arange(size * 2, dtype=float).reshape(size, 2)
    drift = np.arange(1, size + 1)[:, None]
    expected = reference.local_sgd(start, 9, period, lambda step, w: w + (step + 1) * drift, warmup_steps)
    weights = tf.Variable(start[rank])
    averager = PeriodicModelAverager(period, warmup_steps)

    def train(step):
        weights.assign_add(tf.fill([2], tf.cast(step + 1, tf.float64)) * (rank + 1))
        averager.average_parameters([weights])
        return weights + 0

    train = tf.function(train) if in_graph else train
    for step in range(9):
        returned = train(tf.constant(step)).numpy()
        np.testing.assert_allclose(weights.numpy(), expected[step][rank], rtol=1e-14)
        np.testing.assert_allclose(returned, expected[step][rank], rtol=1e-14, err_msg="read after the round")
        assert averager.step == step + 1


@pytest.mark.ranks(2, **on_ranks)
def test_a_loop_inside_a_function(rank):
    weights, averager = tf.Variable(float(rank)), PeriodicModelAverager(period=2, warmup_steps=1)

    @tf.function
    def train(steps):
        for _ in tf.range(steps):
            weights.assign_add(1.0 + rank)
            averager.average_parameters([weights])

    train(5)
    # Rounds at steps 1 and 3: (2 + 5) / 2 = 3.5, then 3.5 + (2 + 4) / 2 = 6.5, then one step.
    assert (weights.numpy(), averager.step) == (6.5 + 1 + rank, 5)
    train(1)
    assert weights.numpy() == 6.5 + 3, "a round at step 5"


@pytest.mark.ranks(2, **on_ranks)
def test_around_a_compiled_step(rank):
    weights, averager = tf.Variable([1.0 * rank, 2.0]), PeriodicModelAverager(period=1 + 1)

    @tf.function(jit_compile=True)
    def compiled(x):
        weights.assign_sub(0.5 * x * weights)

    @tf.function
    def train(x):
        compiled(x)
        averager.average_parameters([weights])

    for _ in range(3):
        train(tf.constant(1.0))
    # 0.5 r | mean 0.25 | 0.125 | 0.0625, averaged
    np.testing.assert_allclose(weights.numpy(), [0.0625, 0.25])


@pytest.mark.ranks(2, **on_gloo)
def test_counting_goes_on_between_graph_and_eager(rank):
    weights, averager = tf.Variable(1.0 * rank), PeriodicModelAverager(period=100, warmup_steps=100)
    graph = tf.function(lambda: averager.average_parameters([weights]))
    averager.average_parameters([weights])
    graph()
    graph()
    averager.average_parameters([weights])
    assert averager.step == 4
    assert averager.state_dict() == {"step": 4}
    averager.load_state_dict({"step": 99})
    graph()
    assert weights.numpy() == rank
    graph()
    assert (weights.numpy(), averager.step) == (0.5, 101)


@pytest.mark.ranks(2, **on_ranks)
def test_an_error_inside_a_graph_keeps_its_message(rank):
    weights, averager = variable(rank, (2 + rank,)), PeriodicModelAverager(period=2)
    with pytest.raises(tf.errors.OpError, match="LayoutMismatchError.*first difference is parameter number 0"):
        tf.function(lambda: averager.average_parameters([weights]))()
    assert weights.numpy()[0] == rank
    assert averager.step == 0


@pytest.mark.ranks(2, **on_gloo)
def test_what_cannot_be_in_a_graph_says_so_while_tracing(rank):
    class Branching(ModelAverager):
        def due(self, step):
            return step > 3 and step % 2 == 0

        def describe(self):
            return "Branching()"

    weights = [variable(rank)]
    for call, says in [
        (lambda: Branching().average_parameters(weights), "due.. with & and |"),
        (lambda: average_parameters(weights), "outside the tf.function"),
        (lambda: broadcast_parameters(weights), "outside the tf.function"),
        (lambda: check_replicas(weights), "outside the tf.function"),
        (lambda: PeriodicModelAverager(2).join(weights), "outside"),
        (lambda: PeriodicModelAverager(2).average_parameters(weights, steps=2), "steps=2"),
    ]:
        with pytest.raises((AveragingError, ValueError), match=says):
            tf.function(call, autograph=False)()


@pytest.mark.ranks(2, **on_gloo, env={"TF_NUM_INTEROP_THREADS": "1"})
def test_one_tensorflow_thread_is_too_few_for_a_graph(rank):
    weights, averager = variable(rank), PeriodicModelAverager(period=2)
    with pytest.raises(AveragingError, match="set_inter_op_parallelism_threads"):
        tf.function(lambda: averager.average_parameters([weights]), autograph=False)()
    assert averager.average_parameters([weights]).ranks == 2, "outside it works"


@pytest.mark.ranks(2, **on_gloo)
def test_functions_are_traced_once(rank, monkeypatch):
    from hvd_averaging.adapters import loaded_adapters
    from hvd_averaging.adapters.tensorflow_reduction import Functions

    traced, average = [], Functions._average
    monkeypatch.setattr(Functions, "_average", lambda self, *given: traced.append(self) or average(self, *given))

    (adapter,) = (adapter for adapter in loaded_adapters() if adapter.framework == "tensorflow")
    adapter._functions.clear()
    weights, averager = [variable(rank), variable(rank, (3, 3))], PeriodicModelAverager(period=2)
    for _ in range(100):
        averager.average_parameters(weights)
    for _ in range(3):
        average_parameters(weights)
    functions = adapter._functions.values()
    assert traced == list(functions)
    assert [len(f._traces) for f in functions] == [1, 1], "one for the averager, one for the function"
    kept = weakref.ref(weights.pop())
    gc.collect()
    assert kept() is None, "a trace keeps no variable"
    assert [len(f._traces) for f in functions] == [0, 0], "nor is a trace kept that nobody can want any more"


@pytest.mark.ranks(2, **on_gloo)
def test_a_variable_replaced_by_one_like_it(rank):
    first, old, new = variable(rank), variable(rank), variable(rank + 10)
    averager = PeriodicModelAverager(period=2)
    for second in (old, old, new, new):
        averager.average_parameters([first, second])
    np.testing.assert_allclose(new.numpy(), variable(10.5).numpy())


@pytest.mark.ranks(2, 4, **on_ranks)
def test_a_rank_in_hvd_join_does_not_shrink_the_weights(rank, size):
    import horovod.tensorflow as hvd

    weights = tf.Variable([2.0, 4.0])
    averager = PeriodicModelAverager(period=2)
    averager.average_parameters([weights], steps=2)
    if rank != size - 1:
        assert averager.average_parameters([weights]).ranks == size - 1
    assert weights.numpy().tolist() == [2, 4]
    hvd.join()


@pytest.mark.ranks(2, **on_ranks)
def test_different_numbers_of_batches_and_missed_steps(rank):
    weights, averager = tf.Variable(0.0), PeriodicModelAverager(period=5, timeout=20)
    for _ in range(10 + rank):
        weights.assign_add(1.0)
        averager.average_parameters([weights])
    averager.join([weights])
    assert averager.step == 11
    assert check_replicas([weights])
    with pytest.raises(StepMismatchError, match="rank 0 at step 12, rank 1 at step 13"), averager:
        averager.average_parameters([weights], steps=1 + rank)


@pytest.mark.ranks(2, **on_ranks)
def test_broadcast_carries_every_variable_bit_for_bit(rank):
    import keras

    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    )
    others = [
        tf.Variable(rank == 0),
        tf.Variable(tf.constant([rank, 7], tf.int8)),
        tf.Variable(tf.constant([float("nan"), -0.0, rank], tf.bfloat16)),
        tf.Variable(tf.complex(1.0 * rank, 2.0)),
        tf.Variable(tf.zeros([0, 2])),
        tf.Variable(rank, dtype=tf.int64),
    ]
    assert not check_replicas(others)
    for params in (model, others):
        broadcast_parameters(params, root_rank=1)
        assert check_replicas(params)
    assert (bool(others[0].numpy()), int(others[1].numpy()[0]), int(others[5].numpy())) == (False, 1, 1)


@pytest.mark.ranks(2, **on_gloo)
def test_averaged_for_a_while(rank):
    model = dense_model(rank)
    before = [weight.numpy() for weight in model.variables]
    with averaged(model):
        assert all((weight.numpy() == 0.5).all() for weight in model.trainable_variables)
    assert all((weight.numpy() == kept).all() for weight, kept in zip(model.variables, before, strict=True))
    assert not check_replicas(model)


def test_a_rank_that_never_comes_ends_the_job(horovodrun):
    script = """
        import time
        import tensorflow as tf, horovod.tensorflow as hvd
        from hvd_averaging import PeriodicModelAverager
        hvd.init()
        averager, weights = PeriodicModelAverager(period=2, timeout=3, name="slow"), tf.Variable(1.0)
        averager.average_parameters([weights], steps=2)
        time.sleep(600 * hvd.rank())
        averager.average_parameters([weights])
    """
    done = horovodrun(2, textwrap.dedent(script), limit=90, framework="tensorflow")
    assert not done.timed_out
    assert done.returncode != 0
    assert "slow (step 2, process set {0, 1}): rank 0 has waited 3 s for rank 1" in " ".join(done.output.split())


def test_a_variable_on_another_device_on_one_rank_is_an_error_on_both(horovodrun):
    script = """
        import tensorflow as tf, horovod.tensorflow as hvd
        from hvd_averaging import LayoutMismatchError, PeriodicModelAverager
        hvd.init()
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], two)
        averager, weights = PeriodicModelAverager(period=2), []
        for device in ("CPU:0", "CPU:1" if hvd.rank() == 1 else "CPU:0"):
            with tf.device(device):
                weights.append(tf.Variable([float(hvd.rank())]))
        try:
            averager.average_parameters(weights)
        except LayoutMismatchError as error:
            message = " ".join(str(error).split())
            print(f"rank {hvd.rank()} keeps {[float(w[0]) for w in weights]} and reads: {message}")
    """
    done = horovodrun(2, textwrap.dedent(script), framework="tensorflow")
    assert done.returncode == 0
    first = "the first difference is parameter number 1: rank 0: '1' of shape [1], float32; "
    first += "rank 1: '1' of shape [1], float32 on the cpu that is its rank's device number 2."
    for rank, kept in enumerate(("[0.0, 0.0]", "[1.0, 1.0]")):
        said = next(line for line in done.output.splitlines() if f"rank {rank} keeps {kept}" in line)
        assert first in said
