"""Exact equivalences: where averaging must amount to something simpler, to the last bit or to rounding."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from test_post_local_sgd import batch, close, small_model
from test_torch_optimizer import alone

from hvd_averaging import HierarchicalModelAverager, PeriodicModelAverager, check_replicas
from hvd_averaging.torch import PostLocalSGDOptimizer

dynamic = functools.partial(pytest.mark.ranks, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
on_gloo = functools.partial(pytest.mark.ranks, backends=("gloo",))
pytestmark = pytest.mark.filterwarnings("ignore:With (a single )?period")


def train(model, averager, rank, steps, options, after_round=lambda: None):
    """Local SGD with a plain optimizer; returns the steps of the rounds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    rounds = []
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        done = averager.average_parameters(model.parameters())
        if done is not None:
            rounds.append(done.step)
            after_round()
    return rounds


@on_gloo(2, 4)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "weight_decay": 0.05},
    ],
    ids=["plain", "momentum", "nesterov", "weight decay"],
)
@pytest.mark.parametrize("front", ["averager", "optimizer", "optimizer that averages its state"])
def test_period_one_is_gradient_averaging(rank, size, options, front):
    model, averager = small_model(), PeriodicModelAverager(1)
    if front == "averager":
        train(model, averager, rank, 8, options)
    else:
        inner = torch.optim.SGD(model.parameters(), lr=0.1, **options)
        state = "local" if front == "optimizer" else "average"
        optimizer = PostLocalSGDOptimizer(inner, averager, None, optimizer_state=state)
        for step in range(8):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
    expected, _ = alone(size, range(8), lambda m: torch.optim.SGD(m.parameters(), lr=0.1, **options))
    close(model.parameters(), expected.parameters(), rtol=0, atol=1e-6)


@dynamic(4)
def test_one_level_is_the_periodic_averager_bit_for_bit(rank, size):
    levels, periodic = small_model(), small_model()
    assert train(levels, HierarchicalModelAverager({3: size}), rank, 10, {"momentum": 0.9}) == [0, 3, 6, 9]
    assert train(periodic, PeriodicModelAverager(3), rank, 10, {"momentum": 0.9}) == [0, 3, 6, 9]
    close(levels.parameters(), periodic.parameters(), rtol=0, atol=0)


@pytest.mark.ranks(2, 3, 4)
def test_after_any_round_replicas_are_bitwise_equal(rank):
    model = small_model(seed=rank)
    equal = []
    averager = PeriodicModelAverager(3, warmup_steps=2)
    train(model, averager, rank, 9, {}, lambda: equal.append(bool(check_replicas(model))))
    assert equal == [True, True, True]


@on_gloo(2, 4)
@pytest.mark.parametrize("front", ["averager", "optimizer"])
def test_identical_replicas_on_identical_data_stay_those_of_one_process(rank, front):
    model, single = small_model(), small_model()
    plain = torch.optim.SGD(single.parameters(), lr=0.1, momentum=0.9)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averager = PeriodicModelAverager(2, warmup_steps=3)
    optimizer = PostLocalSGDOptimizer(inner, averager, None, optimizer_state="average")
    for step in range(8):
        for net, its in ((single, plain), (model, inner if front == "averager" else optimizer)):
            its.zero_grad()
            net(batch(0, step)).square().mean().backward()
            its.step()
        if front == "averager":
            averager.average_parameters(model)
        close(model.parameters(), single.parameters(), rtol=0, atol=0)


@on_gloo(2)
@pytest.mark.parametrize(("steps", "period", "warmup_steps"), [(20, 3, 0), (20, 4, 5), (7, 10, 2), (5, 2, 9)])
def test_the_number_of_rounds(rank, steps, period, warmup_steps):
    rounds = train(small_model(), PeriodicModelAverager(period, warmup_steps), rank, steps, {})
    assert len(rounds) == max(0, math.ceil((steps - warmup_steps) / period))
