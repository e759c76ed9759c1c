"""What becomes of a model's buffers, and rounds outside the schedule (CASES.md, What the mean means)."""

from __future__ import annotations

import functools
import warnings

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from hvd_averaging import (
    AveragingError,
    HierarchicalModelAverager,
    LayoutMismatchError,
    PeerError,
    PeriodicModelAverager,
    average_parameters,
    averaged,
    check_replicas,
)
from hvd_averaging.torch import PostLocalSGDOptimizer, flatten_parameters

dynamic = functools.partial(pytest.mark.ranks, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
on_gloo = functools.partial(pytest.mark.ranks, backends=("gloo",))


def normalized(rank=0):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    model[1].running_mean.fill_(10.0 * rank)
    model[1].running_var.fill_(1.0 + rank)
    model[1].num_batches_tracked.fill_(3 + 2 * rank)
    return model


class Odd(torch.nn.Module):
    """Buffers of many kinds."""

    def __init__(self, rank):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), float(rank)))
        for name, tensor in {
            "rounded": torch.full((3,), 1.0 + rank, dtype=torch.bfloat16),
            "count": torch.tensor(2**40 + rank),
            "steps": torch.tensor(5 - rank, dtype=torch.int16),
            "ids": torch.arange(4) + rank,
            "large": torch.tensor([2**62 + rank, -(2**62) - rank]),
            "flag": torch.tensor(rank == 0),
            "mask": torch.tensor([True, rank == 1]),
            "wave": torch.tensor([complex(rank, 1 - rank)]),
            "strange": torch.tensor([0.1, float("inf") if rank else -0.1]),
        }.items():
            self.register_buffer(name, tensor)


@pytest.mark.ranks(2, 4)
def test_the_law_of_total_variance(rank, size):
    model = normalized(rank)
    done = average_parameters(model, buffers="average")
    means, variances = 10.0 * np.arange(size), 1.0 + np.arange(size)
    assert (model[1].running_mean == means.mean()).all()
    assert (model[1].running_var == variances.mean() + means.var()).all()
    assert model[1].num_batches_tracked.dtype == torch.int64 and model[1].num_batches_tracked.shape == ()
    assert model[1].num_batches_tracked == 3 + 2 * (size - 1)
    assert done.ranks == size and check_replicas(model)


@on_gloo(2)
def test_the_variance_is_that_of_all_data_together(rank, size):
    rows = torch.randn(size, 1000, 4, generator=torch.Generator().manual_seed(3)) + torch.arange(size)[:, None, None]
    layer = torch.nn.BatchNorm1d(4, momentum=None)  # plain means of what it has seen
    layer(1e3 + rows[rank])
    average_parameters(layer, buffers="average")
    everything = (1e3 + rows.double()).reshape(-1, 4)
    torch.testing.assert_close(layer.running_mean.double(), everything.mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(layer.running_var.double(), everything.var(0), rtol=2e-3, atol=0)


@on_gloo(2, 4)
def test_equal_statistics_stay_bit_for_bit(rank):
    model = normalized()
    numbers = torch.Generator().manual_seed(1)
    model[1].running_mean.copy_(100 * torch.randn(4, generator=numbers))
    model[1].running_var.copy_(torch.rand(4, generator=numbers))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for buffers in ("average", "broadcast"):
        average_parameters(model, buffers=buffers)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@on_gloo(2)
def test_training_on_different_data_evaluates_alike(rank):
    model = normalized()
    averager = PeriodicModelAverager(period=2, buffers="average")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(10 * step + rank)) + rank
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        averager.average_parameters(model)
    assert check_replicas([model.eval()(torch.ones(1, 3)).detach()])


@on_gloo(2)
def test_every_kind_of_buffer_by_its_rule(rank):
    model = Odd(rank)
    average_parameters(model, buffers="average")
    assert (model.rounded == 1.5).all() and model.rounded.dtype == torch.bfloat16
    assert model.count == 2**40 + 1 and model.steps == 5 and model.steps.dtype == torch.int16
    assert model.ids.tolist() == [0 + rank, 1 + rank, 2 + rank, 3 + rank]
    assert bool(model.flag) == (rank == 0) and model.mask.tolist() == [True, rank == 1]
    assert model.wave.tolist() == [complex(0.5, 0.5)] and model.weight.tolist() == [0.5, 0.5]


@on_gloo(2, 3)
def test_broadcast_copies_every_kind_from_the_first_rank(rank):
    model, first = Odd(rank), Odd(0)
    average_parameters(model, buffers="broadcast")
    for (name, found), expected in zip(model.named_buffers(), first.buffers(), strict=True):
        assert torch.equal(found, expected) and found.dtype == expected.dtype, name
    assert check_replicas(model)


@on_gloo(2)
def test_local_buffers_stay_and_are_warned_of_once(rank):
    model = normalized(rank)
    averager = PeriodicModelAverager(period=2)
    with pytest.warns(UserWarning, match='batch normalization.*buffers="average"'):
        averager.average_parameters(model)
    assert (model[1].running_mean == 10.0 * rank).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        averager.average_parameters(model)
        averager.average_parameters(model)
        PeriodicModelAverager(period=2).average_parameters(torch.nn.Linear(2, 2))
        PeriodicModelAverager(period=2, buffers="average").average_parameters(model)


@on_gloo(2)
@pytest.mark.parametrize("who", [{0, 1}, {1}])
def test_buffers_need_the_model(rank, who):
    model = normalized(rank)
    averager = PeriodicModelAverager(period=2, buffers="average", timeout=20)
    with pytest.raises(ValueError if rank in who else PeerError, match="pass the model" if rank in who else "rank 1"):
        averager.average_parameters(list(model.parameters()) if rank in who else model)
    assert (model[1].running_mean == 10.0 * rank).all() and averager.step == 0


@on_gloo(2)
def test_ranks_with_other_buffers_are_named(rank):
    model = normalized()
    if rank == 1:
        model.register_buffer("extra", torch.zeros(2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(LayoutMismatchError, match="extra"):
        average_parameters(model, buffers="average")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_an_unknown_word_is_refused():
    with pytest.raises(ValueError, match="'local', 'average', 'broadcast'; not 'sum'"):
        PeriodicModelAverager(period=2, buffers="sum")


@pytest.mark.ranks(3)
def test_a_joined_rank_changes_no_statistics(rank):
    model, copied = normalized(rank), Odd(rank)
    if rank == 0:
        hvd.join()
    else:
        average_parameters(model, buffers="average")
        average_parameters(copied, buffers="broadcast")
        hvd.join()
        assert (model[1].running_mean == 15.0).all()
        assert (model[1].running_var == 2.5 + 25).all() and model[1].num_batches_tracked == 7
        assert copied.steps == 5 - rank, "the first rank is not there to be copied"
        assert (copied.weight == 1.5).all()


@dynamic(4)
def test_every_level_of_a_hierarchy_takes_buffers_along(rank):
    model = normalized(rank)
    averager = HierarchicalModelAverager({1: 2, 2: 4}, buffers="average", warmup_steps=1)
    averager.step = 1
    averager.average_parameters(model)
    assert (model[1].running_mean == [5.0, 5.0, 25.0, 25.0][rank]).all()
    averager.average_parameters(model)
    assert (model[1].running_mean == 15.0).all() and model[1].num_batches_tracked == 9


@on_gloo(2)
def test_the_optimizer_takes_buffers_along(rank):
    model = normalized(rank)
    averager = PeriodicModelAverager(period=2, buffers="average")
    optimizer = PostLocalSGDOptimizer(
        torch.optim.Adam(model.parameters()), averager, None, optimizer_state="average", model=model
    )
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 3) + rank).square().mean().backward()
        optimizer.step()
    assert check_replicas(model)
    assert check_replicas([value for state in optimizer.state.values() for value in state.values()])


class Running(torch.nn.Module):
    """What is called like the statistics of batch normalization, but is not."""

    def __init__(self, plain):
        super().__init__()
        self.running_mean = torch.zeros(2) if plain else torch.nn.Parameter(torch.zeros(2))
        self.running_var = torch.ones(2) if plain else torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.weight = torch.nn.Parameter(torch.zeros(2))


@on_gloo(2)
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("buffers", ["local", "average", "broadcast"])
def test_running_statistics_that_are_no_buffers(rank, plain, buffers):
    model = Running(plain)
    with torch.no_grad():
        model.weight.fill_(rank)
    PeriodicModelAverager(period=2, buffers=buffers, timeout=20).average_parameters(model)
    assert (model.weight == 0.5).all()


@on_gloo(2)
@pytest.mark.parametrize("buffers", ["average", "broadcast"])
@pytest.mark.parametrize(
    ("odd", "words"), [(torch.ones(()).expand(3), "expanded"), (torch.eye(3).to_sparse(), "only dense tensors")]
)
def test_a_buffer_that_cannot_travel_is_told_to_all(rank, buffers, odd, words):
    model = normalized()
    model.register_buffer("odd", odd if rank == 1 else torch.ones(odd.shape))
    with torch.no_grad():
        model[0].bias.fill_(rank)
    with pytest.raises((TypeError, ValueError) if rank else PeerError, match=words if rank else "rank 1"):
        average_parameters(model, buffers=buffers, timeout=20)
    assert (model[0].bias == rank).all()


@on_gloo(2)
@pytest.mark.parametrize("flat", [False, True])
def test_evaluation_in_inference_mode_leaves_later_rounds_possible(rank, flat):
    model = normalized(rank)
    if flat:
        flatten_parameters(model)
    averager = PeriodicModelAverager(period=1, buffers="average", timeout=20)
    with torch.inference_mode():
        with averager.averaged(model):
            assert check_replicas(model)
        averager.average_now(model)
    for _ in range(2):
        model(torch.randn(4, 3)).sum().backward()
        averager.average_parameters(model)
    assert check_replicas(model)


# ---- outside the schedule -----------------------------------------------------------------------------------------


@on_gloo(2, 4)
def test_average_now_counts_nothing(rank, size):
    model = normalized(rank)
    with torch.no_grad():
        model[0].bias.fill_(float(rank))
    averager = PeriodicModelAverager(period=5, warmup_steps=100, buffers="average")
    averager.average_parameters(model)
    done = averager.average_now(model)
    assert (done.ranks, done.step, averager.step) == (size, 1, 1)
    assert (model[0].bias == (size - 1) / 2).all() and check_replicas(model)
    averager.average_parameters(model)
    assert averager.step == 2


@on_gloo(2)
def test_a_round_outside_the_schedule_never_meets_one_of_the_schedule(rank):
    weights = torch.nn.Parameter(torch.full((2,), float(rank)))
    averager = PeriodicModelAverager(period=1, timeout=20)
    averager.average_parameters([weights])
    with torch.no_grad():
        weights.fill_(float(rank))
    with pytest.raises(LayoutMismatchError, match="outside its schedule"):
        (averager.average_now if rank else averager.average_parameters)([weights])
    assert (weights == rank).all()
    averager.average_now([weights])
    assert (weights == 0.5).all()


@dynamic(4)
def test_average_now_takes_the_largest_level(rank):
    weights = torch.tensor([float(rank)])
    averager = HierarchicalModelAverager({2: 2, 4: 4}, warmup_steps=100)
    assert averager.average_now([weights]).ranks == 4 and weights.item() == 1.5


@on_gloo(2)
@pytest.mark.parametrize("fails", [False, True])
def test_evaluating_on_the_mean_leaves_everything_as_it_was(rank, fails):
    model = normalized(rank)
    with torch.no_grad():
        model[0].bias.fill_(0.1 + rank)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    averager = PeriodicModelAverager(period=2, buffers="average")

    def evaluate():
        with averager.averaged(model):
            assert check_replicas(model)
            assert (model[1].running_mean == 5.0).all()
            if fails and rank == 1:
                raise KeyError("in the evaluation")

    if fails and rank == 1:
        with pytest.raises(KeyError):
            evaluate()
    else:
        evaluate()
    with averaged(model, buffers="broadcast"):
        assert (model[1].running_mean == 0.0).all()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert averager.step == 0


@on_gloo(2)
def test_paused_counts_nothing_and_averages_nothing(rank):
    weights = torch.tensor([float(rank)])
    averager = PeriodicModelAverager(period=1)
    with averager.paused():
        assert [averager.average_parameters([weights]) for _ in range(3)] == [None] * 3
        with averager.paused():
            pass
        assert averager.average_parameters([weights]) is None
    assert (averager.step, weights.item()) == (0, rank)
    assert averager.average_parameters([weights]).step == 0 and weights.item() == 0.5


@pytest.mark.ranks(2, framework="tensorflow")
def test_keras_statistics_follow_the_same_law(rank):
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])
    model.add(keras.layers.Dropout(0.5))
    layer = model.layers[1]
    layer.moving_mean.assign([10.0 * rank] * 4)
    layer.moving_variance.assign([1.0 + rank] * 4)
    seed = model.layers[2].seed_generator.state.numpy().copy()
    averager = PeriodicModelAverager(period=2, buffers="average")
    averager.average_parameters(model)
    assert (layer.moving_mean.numpy() == 5).all() and (layer.moving_variance.numpy() == 26.5).all()
    assert (model.layers[2].seed_generator.state.numpy() == seed).all()
    layer.moving_mean.assign([3.0 + rank] * 4)
    average_parameters(model, buffers="broadcast")
    assert (layer.moving_mean.numpy() == 3).all() and check_replicas(model.trainable_variables)
    with pytest.warns(UserWarning, match="batch normalization"):
        PeriodicModelAverager(period=2).average_parameters(model)


@pytest.mark.ranks(2, framework="tensorflow")
def test_a_graph_takes_buffers_along_and_cannot_be_paused(rank):
    import keras
    import tensorflow as tf

    layer = keras.layers.BatchNormalization()
    layer.build((None, 2))
    averager = PeriodicModelAverager(period=2, buffers="average")

    @tf.function
    def step():
        layer.moving_mean.assign([10.0 * rank] * 2)
        averager.average_parameters(layer)

    step()
    assert (layer.moving_mean.numpy() == 5).all() and (layer.moving_variance.numpy() == 26).all()
    step()
    assert (layer.moving_mean.numpy() == 10.0 * rank).all() and averager.step == 2
    with pytest.raises(AveragingError, match="cannot be paused"), averager.paused():
        pass
