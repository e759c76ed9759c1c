"""Fewer bytes: the change since the last agreed weights travels, in fewer bits, and nothing is lost for good."""

from __future__ import annotations

import copy
import functools
import io
import warnings
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import pytest
import reference
import torch

from hvd_averaging import (
    AveragingError,
    HierarchicalModelAverager,
    LayoutMismatchError,
    PeriodicModelAverager,
    check_replicas,
)
from hvd_averaging.adapters.torch_codec import CODINGS
from hvd_averaging.layout import Entry, Layout
from hvd_averaging.torch import PostLocalSGDOptimizer, flatten_parameters
from hvd_averaging.wire import WireRounds

WIRES = ("fp16", "bf16", "int8")
LARGEST_ROUNDING = {"fp16": 2**-11, "bf16": 2**-8, "int8": 1 / 254}
"""Of a change, relative to the largest one in its block."""

on_gloo = functools.partial(pytest.mark.ranks, backends=("gloo",))
dynamic = functools.partial(pytest.mark.ranks, backends=("gloo",), env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
on_tensorflow = functools.partial(pytest.mark.ranks, backends=("gloo",), framework="tensorflow")
each_wire = pytest.mark.parametrize("wire", WIRES)


def averager_of(wire, period=2, **options):
    return PeriodicModelAverager(period, wire=wire, **options)


def every_step(wire, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a period of 1 saves nothing
        return averager_of(wire, 1, **options)


def noise(rank, step, count, dtype=torch.float64):
    return torch.from_numpy(np.random.default_rng(1000 * step + rank).normal(0, 0.01, count)).to(dtype)


@each_wire
@pytest.mark.ranks(2)
@on_gloo(3)
def test_every_step_follows_the_reference(rank, size, wire):
    check_against_reference(rank, size, wire)


def check_against_reference(rank, size, wire, bucket_bytes=None, shapes=((700,), (), (40, 30))):
    sizes = [int(np.prod(shape)) for shape in shapes]
    weights = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]

    def local(step, replicas):
        return replicas + np.stack([noise(r, step, sum(sizes)).numpy() for r in range(size)])

    expected = reference.local_sgd_in_changes(np.zeros((size, sum(sizes))), 9, 2, local, wire)
    averager = averager_of(wire, bucket_bytes=bucket_bytes)
    for step in range(9):
        for weight, change in zip(weights, noise(rank, step, sum(sizes)).split(sizes), strict=True):
            weight += change.view(weight.shape)
        averager.average_parameters(weights)
        flat = torch.cat([weight.reshape(-1) for weight in weights]).numpy()
        np.testing.assert_allclose(flat, expected[step][rank], rtol=0, atol=1e-12)


@each_wire
@on_gloo(2)
def test_what_was_left_out_comes_later(rank, wire):
    weights = torch.zeros(1000)
    averager = every_step(wire)
    averager.average_parameters([weights])
    weights += noise(rank, 0, 1000, torch.float32)
    mean = hvd.allreduce(weights, name="mean")
    distances = []
    for _ in range(4):
        averager.average_parameters([weights])
        distances.append(float((weights - mean).abs().max()))
    assert distances[0] > 1e-6
    assert distances[-1] < 2**-24  # the smallest number that float16 has, and what float32 tells apart here


@each_wire
@on_gloo(2)
def test_rounding_does_not_add_up(rank, wire):
    weights = torch.zeros(3)
    averager = every_step(wire)
    averager.average_parameters([weights])
    # Alone, most of this would be lost: the last number is nothing beside the first of its block, the second is small.
    drift = torch.tensor([1.0, 1e-4, 1e-6]) * (rank + 1)
    for _ in range(100):
        weights += drift
        averager.average_parameters([weights])
    expected = 100 * 1.5 * torch.tensor([1.0, 1e-4, 1e-6])
    largest = LARGEST_ROUNDING[wire] * (1.5 if wire == "int8" else 1.5 * torch.tensor([1.0, 1e-4, 1e-6]))
    assert ((weights - expected).abs() < 3 * largest + 1e-5 * expected + 2**-23).all(), (weights, expected)


@each_wire
@pytest.mark.ranks(2)
@on_gloo(4)
def test_equal_replicas_stay_as_they_are(wire):
    weights = torch.tensor([0.1, 70000.0, -3e-7, 0.0])
    averager = every_step(wire)
    for _ in range(3):
        averager.average_parameters([weights])
    assert torch.equal(weights, torch.tensor([0.1, 70000.0, -3e-7, 0.0]))


@each_wire
@pytest.mark.ranks(2)
@on_gloo(3)
def test_replicas_are_equal_after_every_round(rank, wire):
    weights = [torch.zeros(1030), torch.zeros(5, 3).t(), torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)]
    averager = every_step(wire)
    for step in range(4):
        for number, weight in enumerate(weights):
            weight += noise(rank, 10 * step + number, weight.numel(), weight.dtype).view(weight.shape)
        means = [hvd.allreduce(weight.contiguous(), name=f"mean {n}") for n, weight in enumerate(weights)]
        averager.average_parameters(weights)
        assert check_replicas(weights)
        for weight, mean in zip(weights, means, strict=True):
            assert (weight - mean).abs().max() < 0.05 * 3 * LARGEST_ROUNDING[wire]


@each_wire
@on_gloo(2)
def test_every_kind_of_parameter(rank, wire):
    kinds = [torch.bfloat16, torch.float16, torch.float64, torch.complex64]
    weights = [torch.full((3,), 1.0 + rank, dtype=kind) for kind in kinds] + [torch.tensor(1.0 + rank), torch.zeros(0)]
    averager = every_step(wire)
    for base in (1.0, 3.0, 9.0):
        for weight in weights:
            weight.fill_(base + rank)
        done = averager.average_parameters(weights)
        assert done.tensors == 6
        for weight in weights:
            assert torch.allclose(weight, torch.full_like(weight, base + 0.5), rtol=0.02)
        assert check_replicas(weights)


@each_wire
@on_gloo(2)
def test_nothing_but_empty_parameters(wire):
    averager = every_step(wire)
    weights = [torch.zeros(0), torch.zeros(3, 0)]
    assert [averager.average_parameters(weights).bytes for _ in range(2)] == [0, 0]


@on_gloo(2, 3)
@pytest.mark.parametrize(
    ("wire", "bad"), [*((wire, float(bad)) for wire in WIRES for bad in ("nan", "inf")), ("fp16", 1e6)]
)
def test_what_the_coding_cannot_hold_travels_as_it_is(rank, size, wire, bad):
    weights = torch.zeros(600)
    averager = every_step(wire)
    averager.average_parameters([weights])
    weights += rank
    if rank == 1:
        weights[7] = bad
    mean = hvd.allreduce(weights, name="mean")
    for _ in range(2):  # in the second, too, where the anchor is no number
        averager.average_parameters([weights])
        assert torch.allclose(weights, mean, equal_nan=True)
    weights.fill_(1.0 + rank)
    averager.average_parameters([weights])
    assert torch.allclose(weights, torch.tensor(1 + (size - 1) / 2), rtol=0, atol=300 if bad == 1e6 else 1e-6)
    weights += rank
    assert averager.average_parameters([weights]).bytes < 2400  # and again in changes
    assert torch.allclose(weights, torch.tensor(1 + (size - 1.0)), rtol=0, atol=0.02)
    assert check_replicas([weights])


@on_gloo(2)
def test_finite_numbers_whose_sum_is_not_travel_as_changes(rank):
    weights = torch.zeros(600)
    averager = every_step("bf16")
    averager.average_parameters([weights])
    weights += 1e37 * (rank + 1)
    assert averager.average_parameters([weights]).bytes < 2400
    assert torch.allclose(weights, torch.tensor(1.5e37), rtol=0.01)
    assert check_replicas([weights])


@on_gloo(2)
def test_blocks_of_zeros_and_of_next_to_nothing(rank):
    weights = torch.zeros(4 * 512)
    averager = every_step("int8")
    averager.average_parameters([weights])
    weights[512:1024] += 1e-44 * rank
    weights[1024:1536] += 1e-26 * (rank + 1)
    averager.average_parameters([weights])
    assert (weights[:512] == 0).all() and (weights[1536:] == 0).all()
    assert (weights[512:1024] <= 1e-44).all()
    assert torch.allclose(weights[1024:1536], torch.tensor(1.5e-26), rtol=0.01, atol=0)
    assert check_replicas([weights])


def test_what_is_left_out_again_and_again_does_not_become_denormal():
    # Parameters that no longer change leave less in every round; processors take ten times as long for such numbers.
    left = noise(0, 0, 4 * 512, torch.float32)
    (coded,) = CODINGS["int8"].stretches(torch.zeros(4 * 516, dtype=torch.uint8), 4 * 512)
    for _ in range(30):
        CODINGS["int8"].encode(left, coded)
    assert (left.abs() < 1e-27).all()
    assert ((left == 0) | (left.abs() >= torch.finfo(torch.float32).tiny)).all()


@each_wire
@on_gloo(2)
def test_flat_parameters_and_any_buckets_give_the_same(rank, wire):
    def run(flat, **options):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 20, 3), torch.nn.Linear(30, 40))
        if flat:
            flatten_parameters(model)
        averager = every_step(wire, **options)
        for step in range(4):
            with torch.no_grad():
                for number, p in enumerate(model.parameters()):
                    p += noise(rank, 10 * step + number, p.numel(), torch.float32).view(p.shape)
            averager.average_parameters(model)
        return [p.detach() for p in model.parameters()]

    plain = run(flat=False)
    assert all(map(torch.equal, run(flat=True), plain))
    for one, other in zip(run(flat=False, bucket_bytes=1024), plain, strict=True):
        assert torch.allclose(one, other, atol=0.05 * 4 * LARGEST_ROUNDING[wire])


@each_wire
@on_gloo(2)
def test_buckets_follow_the_reference_each(rank, size, wire):
    check_against_reference(rank, size, wire, bucket_bytes=8 * 512, shapes=((512 * 3,),))


@on_gloo(2, 3)
@each_wire
def test_bytes_on_the_wire(rank, size, wire):
    """Gloo's ranks on one machine talk over the loopback interface, which counts."""
    sent = Path("/sys/class/net/lo/statistics/tx_bytes")

    def counted(averager):
        weights = torch.zeros(2**20)
        for _ in range(2):  # of which the first agrees, and sends the parameters as they are
            averager.average_parameters([weights])
        hvd.allreduce(torch.zeros(1), name="before")
        before = int(sent.read_text())
        for _ in range(4):
            done = averager.average_parameters([weights])
        hvd.allreduce(torch.zeros(1), name="after")
        return (int(sent.read_text()) - before) / 4, done.bytes

    plain, plain_bytes = counted(every_step(None))
    ours, our_bytes = counted(every_step(wire))
    times_fewer = {"fp16": 2, "bf16": 2, "int8": 4 * 512 / 516}[wire]
    assert plain_bytes == 4 * 2**20
    assert our_bytes == pytest.approx(plain_bytes / times_fewer, rel=0.002)  # shards are padded to whole blocks
    # Together all ranks send 2 (n - 1) times the bytes that each hands over. Other jobs use the interface, too.
    for measured, handed_over in ((plain, plain_bytes), (ours, our_bytes)):
        assert 0.99 < measured / (2 * (size - 1) * handed_over) < 1.25


@on_gloo(3)
def test_a_rank_in_hvd_join_and_its_return(rank, size):
    weights = torch.full((600,), float(rank))
    averager = every_step("int8")
    averager.average_parameters([weights])
    weights += rank
    if rank == 2:
        hvd.join()
    else:
        done = averager.average_parameters([weights])
        assert done.ranks == 2 and done.bytes == 2400
        assert torch.equal(weights, torch.full((600,), 1.5))
        averager.average_parameters([weights])
        hvd.join()
    # Rank 2 has missed two rounds, so that its anchor is an old one.
    averager.step = 3
    weights.fill_(float(rank))
    done = averager.average_parameters([weights])
    assert done.bytes == 2400 and torch.equal(weights, torch.ones(600))
    weights += rank
    done = averager.average_parameters([weights])
    assert done.bytes == 3 * 516  # shards of a block each
    assert torch.allclose(weights, torch.full((600,), 2.0), atol=0.02) and check_replicas([weights])


@on_gloo(2)
def test_ranks_with_fewer_batches(rank):
    weights = torch.full((3,), float(rank))
    averager = averager_of("fp16")
    for _ in range(5 + 2 * rank):
        weights += 1
        averager.average_parameters([weights])
    averager.join([weights])
    assert check_replicas([weights]) and averager.step == 7


@each_wire
@on_gloo(2)
def test_evaluating_the_mean_leaves_the_weights_alone(rank, wire):
    weights = torch.zeros(600)
    averager = averager_of(wire)
    for step in range(5):
        weights += noise(rank, step, 600, torch.float32)
        averager.average_parameters([weights])
        before = weights.clone()
        mean = hvd.allreduce(weights, name="mean")
        with averager.averaged([weights]):
            assert torch.equal(weights, mean)  # exactly: it travels as it is
        assert torch.equal(weights, before)
    assert averager.average_now([weights]).bytes == 2400
    assert check_replicas([weights])


def trained(averager, weights, rank, steps):
    for step in steps:
        weights += noise(rank, step, len(weights), torch.float32)
        averager.average_parameters([weights])
    return weights.clone()


@each_wire
@on_gloo(2)
@pytest.mark.parametrize("fragments", [1, 2])
def test_resuming_equals_an_unbroken_run(rank, wire, fragments):
    weights = torch.zeros(1000)
    averager = averager_of(wire, fragments=fragments)
    trained(averager, weights, rank, range(5))
    file = io.BytesIO()
    torch.save({"averager": averager.state_dict(), "weights": weights}, file)
    unbroken = trained(averager, weights, rank, range(5, 12))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = averager_of(wire, fragments=fragments)
    again.load_state_dict(saved["averager"])
    assert torch.equal(trained(again, saved["weights"], rank, range(5, 12)), unbroken)
    # The averager that went on can go back, too.
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    averager.load_state_dict(saved["averager"])
    weights.copy_(saved["weights"])
    assert torch.equal(trained(averager, weights, rank, range(5, 12)), unbroken)


@on_gloo(2)
@pytest.mark.parametrize("whose", ["rank 0's on both", "rank 0 only", "of another model"])
def test_other_checkpoints_do_no_harm(rank, whose):
    weights = torch.zeros(1000)
    averager = averager_of("int8")
    trained(averager, weights, rank, range(5))
    state = hvd.broadcast_object(averager.state_dict(), name="state")
    again = averager_of("int8")
    state["wire"][0]["residual"]["0"] += 2.0  # as much as if it had been left out on rank 0
    if whose == "of another model":
        state["wire"][0]["anchor"] = {"other": torch.zeros(3)}
    if whose != "rank 0 only" or rank == 0:
        again.load_state_dict(state)
    again.step = 6
    weights += rank
    mean = hvd.allreduce(weights, name="mean")
    done = again.average_parameters([weights])
    # Without a common anchor, as they are: exact, and all that is right.
    assert done.bytes == (1024 + 8 if whose == "rank 0's on both" else 4000)
    expected, tolerance = (mean + 2.0 / 2, 1e-2) if whose == "rank 0's on both" else (mean, 0)
    assert torch.allclose(weights, expected, rtol=0, atol=tolerance)
    assert check_replicas([weights])


@on_gloo(2)
def test_copies_start_afresh(rank):
    weights = torch.zeros(10)
    averager = averager_of("fp16")
    trained(averager, weights, rank, range(3))
    twin = copy.deepcopy(averager)
    twin.step = 4
    weights += rank
    assert twin.average_parameters([weights]).bytes == 40
    assert check_replicas([weights])


@pytest.mark.ranks(2)
def test_ranks_must_agree_about_it(rank):
    weights = torch.full((3,), float(rank))
    for one, other in (("fp16", "int8"), (None, "int8")):
        averager = averager_of(other if rank else one)
        with pytest.raises(LayoutMismatchError, match="rank 1: .*wire='int8'"):
            averager.average_parameters([weights])
        assert torch.equal(weights, torch.full((3,), float(rank)))


@on_gloo(2)
def test_ranks_must_agree_about_bucket_bytes(rank):
    averager = PeriodicModelAverager(2, bucket_bytes=100 + 4 * rank)
    with pytest.raises(LayoutMismatchError, match="bucket_bytes=104"):
        averager.average_parameters([torch.zeros(1000)])


@on_gloo(2)
def test_buffers_are_never_rounded(rank):
    model = torch.nn.BatchNorm1d(3)
    averager = every_step("int8", buffers="average")
    for step in range(3):
        model.running_mean.fill_(0.0 if rank == 0 else 10.0)
        model.running_var.fill_(1.0)
        model.num_batches_tracked.fill_(1000 * step + 3 + 2 * rank)
        averager.average_parameters(model)
        assert torch.equal(model.running_mean, torch.full((3,), 5.0))
        assert torch.equal(model.running_var, torch.full((3,), 26.0))
        assert int(model.num_batches_tracked) == 1000 * step + 5


@each_wire
@dynamic(4)
def test_every_level_of_a_hierarchy_has_its_anchor(rank, size, wire):
    averager = HierarchicalModelAverager({2: 2, 4: 4}, wire=wire)
    weights = torch.zeros(600, dtype=torch.float64)
    exact = np.zeros((size, 600))
    for step in range(14):
        weights += noise(rank, step, 600)
        exact += np.stack([noise(r, step, 600).numpy() for r in range(size)])
        done = averager.average_parameters([weights])
        if step % 4 == 0:
            exact = reference.average(exact)
        elif step % 2 == 0:
            exact = reference.average(reference.average(exact, [0, 1]), [2, 3])
        assert (None if done is None else done.ranks) == {0: 4, 2: 2}.get(step % 4)
        # At most the largest change of four steps, rounded on its way to the pair and to all, there and back.
        np.testing.assert_allclose(weights.numpy(), exact[rank], rtol=0, atol=4 * 0.1 * LARGEST_ROUNDING[wire])
    assert [sorted(level["anchor"]) for level in averager.state_dict()["wire"]] == [["0"], ["0"]]


def test_large_models_have_no_more_buckets_than_names():
    for elements, most in ((10**6, 2), (25 * 10**6, 50), (10**9, 201), (2**36, 201)):
        layout = Layout((Entry("weight", (elements,), "float32"),))
        assert len(layout.buckets(WireRounds("rounds", None, None)._bucket_bytes(layout))) <= most


@on_gloo(2)
@each_wire
def test_the_optimizer_that_averages_gradients_first(rank, wire):
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 3)
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    averager = averager_of(wire, warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(inner, averager, optimizer_state="average")
    for step in range(7):
        optimizer.zero_grad()
        inputs = noise(rank, step, 160, torch.float32).view(8, 20)
        model(inputs).square().mean().backward()
        optimizer.step()
    assert check_replicas(model)
    states = [value for state in inner.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    assert check_replicas(states)


@each_wire
@on_gloo(2)
def test_digits_are_learned_as_well(rank, size, wire):
    accuracy = {wire: accuracy_on_digits(rank, size, wire) for wire in (None, wire)}
    assert accuracy[None] > 0.9
    assert abs(accuracy[wire] - accuracy[None]) < 0.02  # 5 of 360 images are 0.014


def accuracy_on_digits(rank, size, wire):
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = torch.tensor(images[order] / 16, dtype=torch.float32), torch.tensor(labels[order])
    mine = slice(360 + rank, None, size)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averager = averager_of(wire, period=4)
    batches = zip(images[mine].split(32), labels[mine].split(32), strict=True)
    for inputs, targets in [*batches] * 12:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        averager.average_parameters(model)
    averager.average_now(model)
    return float((model(images[:360]).argmax(1) == labels[:360]).float().mean())


@on_tensorflow(2, 3)
@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_tensorflow_follows_the_reference(rank, size, wire):
    import tensorflow as tf

    shapes = ((70, 10), (), (40, 30))
    sizes = [int(np.prod(shape)) for shape in shapes]

    def local(step, replicas):
        return replicas + np.stack([noise(r, step, sum(sizes)).numpy() for r in range(size)])

    expected = reference.local_sgd_in_changes(np.zeros((size, sum(sizes))), 9, 2, local, wire)
    variables = [tf.Variable(tf.zeros(shape, tf.float64)) for shape in shapes]
    averager = averager_of(wire)
    for step in range(9):
        changes = np.split(noise(rank, step, sum(sizes)).numpy(), np.cumsum(sizes)[:-1])
        for variable, change in zip(variables, changes, strict=True):
            variable.assign_add(change.reshape(variable.shape))
        averager.average_parameters(variables)
        flat = np.concatenate([variable.numpy().reshape(-1) for variable in variables])
        np.testing.assert_allclose(flat, expected[step][rank], rtol=0, atol=1e-12)
        if step == 4:  # a copy that takes up the state goes on just so
            averager, state = averager_of(wire), averager.state_dict()
            averager.load_state_dict(state)


@on_tensorflow(2)
@pytest.mark.parametrize("bad", [float("nan"), 1e6])
def test_what_the_coding_cannot_hold_in_tensorflow(rank, bad):
    import tensorflow as tf

    weights = tf.Variable(tf.zeros(600))
    averager = every_step("fp16")
    averager.average_parameters([weights])
    weights[7].assign(bad if rank else 0.0)
    assert averager.average_parameters([weights]).bytes == 2400 + 1200
    np.testing.assert_allclose(weights.numpy(), [bad / 2 if n == 7 else 0.0 for n in range(600)])
    weights.assign(tf.fill(600, float(rank)))
    averager.average_parameters([weights])
    weights.assign_add(tf.fill(600, float(rank)))
    assert averager.average_parameters([weights]).bytes == 1200
    np.testing.assert_allclose(weights.numpy(), 1.0, atol=1e-3 if bad != 1e6 else 300)


@on_tensorflow(2)
def test_in_a_graph_and_in_keras(rank):
    import keras
    import tensorflow as tf

    from hvd_averaging.keras import BroadcastCallback, ModelAveragingCallback

    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(30), keras.layers.BatchNormalization()])
    model.compile("sgd", "mse")
    averager = averager_of("fp16", buffers="average")
    inputs = noise(rank, 0, 64 * 20).numpy().reshape(64, 20)
    callbacks = [BroadcastCallback(), ModelAveragingCallback(averager)]
    model.fit(inputs, np.ones((64, 30)), batch_size=8, callbacks=callbacks, verbose=0, epochs=2)
    averager.average_now(model)
    assert averager.step == 16 and check_replicas(model)

    weights, averager = tf.Variable(tf.zeros(600)), every_step("bf16")

    @tf.function
    def step():
        weights.assign_add(tf.fill([600], float(rank)))
        averager.average_parameters([weights])

    for _ in range(4):
        step()
    np.testing.assert_allclose(weights.numpy(), 2.0, rtol=1e-3)


@on_tensorflow(2)
def test_tensorflow_has_no_int8(rank):
    import tensorflow as tf

    with pytest.raises(AveragingError, match="wire='int8' works with PyTorch only: use one of 'fp16', 'bf16'"):
        averager_of("int8").average_parameters([tf.Variable([1.0])])


def test_what_it_may_be():
    with pytest.raises(ValueError, match="wire is None or one of 'fp16', 'bf16', 'int8'; not 'fp8'"):
        PeriodicModelAverager(4, wire="fp8")
    with pytest.raises(ValueError, match="wire='int8' works without delay only"):
        PeriodicModelAverager(4, wire="int8", delay=1)
    assert PeriodicModelAverager(4).wire is None and PeriodicModelAverager(4, wire="fp16").wire == "fp16"
