"""Rounds that are applied some steps after they began, and rounds over one part of the parameters at a time."""

from __future__ import annotations

import copy
import functools
import warnings

import numpy as np
import pytest
import reference
import torch

from hvd_averaging import AveragingError, LayoutMismatchError, PeriodicModelAverager, check_replicas
from hvd_averaging.layout import Entry, Layout
from hvd_averaging.torch import PostLocalSGDOptimizer, flatten_parameters

on_gloo = functools.partial(pytest.mark.ranks, backends=("gloo",))


def start(size):
    return np.arange(size * 6, dtype=float).reshape(size, 6)


def local(step, replicas):
    """Different on every rank, and not linear: what comes when matters."""
    return replicas * 0.9 + np.arange(1, len(replicas) + 1)[:, None] * (step + 1)


def parameters(rank, size):
    """Three tensors of equally many bytes."""
    return [torch.nn.Parameter(torch.tensor(part)) for part in np.split(start(size)[rank], 3)]


def take_step(weights, rank, step):
    with torch.no_grad():
        for weight in weights:
            weight.mul_(0.9).add_((rank + 1) * (step + 1))


def values(weights):
    return np.concatenate([weight.detach().numpy() for weight in weights])


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("period", "delay", "fragments", "warmup_steps"),
    [(4, 1, 1, 0), (4, 3, 1, 2), (6, 0, 3, 1), (6, 1, 3, 0), (6, 5, 3, 2)],
)
def test_every_step_follows_the_reference(rank, size, period, delay, fragments, warmup_steps):
    expected = reference.delayed_local_sgd(start(size), 16, period, delay, local, warmup_steps, fragments)
    weights = parameters(rank, size)
    averager = PeriodicModelAverager(period, warmup_steps, delay=delay, fragments=fragments)
    ended = []
    for step in range(16):
        take_step(weights, rank, step)
        done = averager.average_parameters(iter(weights))
        if done is not None:
            ended.append((done.step, step, done.tensors, done.ranks))
        np.testing.assert_allclose(values(weights), expected[step][rank], rtol=1e-12)
    starts = range(warmup_steps, 16 - delay, period // fragments)
    assert ended == [(step, step + delay, 3 // fragments, size) for step in starts]


@pytest.mark.ranks(2)
def test_flush_applies_what_is_under_way(rank):
    weights = [torch.nn.Parameter(torch.full((2,), float(rank)))]
    averager = PeriodicModelAverager(8, delay=5)
    assert averager.average_parameters(weights) is None
    with torch.no_grad():
        weights[0].add_(10.0)
    done = averager.flush()
    assert (done.step, done.ranks, averager.step) == (0, 2, 1)
    assert (weights[0] == 10.5).all(), "the step taken meanwhile is kept"
    assert averager.flush() is None


@on_gloo(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_equal_replicas_stay_bit_for_bit(rank, dtype):
    weights = [torch.randn(50, generator=torch.Generator().manual_seed(1)).to(dtype)]
    before = weights[0].clone()
    averager = PeriodicModelAverager(3, delay=2)
    for _ in range(9):
        averager.average_parameters(weights)
    averager.flush()
    assert torch.equal(weights[0], before)


@on_gloo(2)
def test_all_that_ends_a_training_finishes_what_is_under_way(rank):
    def under_way():
        weights = [torch.full((2,), float(rank))]
        averager = PeriodicModelAverager(8, delay=5, fragments=1)
        averager.average_parameters(weights)
        return averager, weights

    averager, weights = under_way()
    with averager:
        pass
    assert (weights[0] == 0.5).all()
    averager, weights = under_way()
    averager.average_now(weights)
    assert (weights[0] == 0.5).all() and averager.flush() is None
    averager, weights = under_way()
    with torch.no_grad():
        weights[0].add_(rank)
    with averager.averaged(weights):
        assert (weights[0] == 1.0).all()
    assert (weights[0] == 0.5 + rank).all()


@on_gloo(2)
@pytest.mark.parametrize("saved_at", range(3, 8))
def test_a_training_resumed_in_mid_flight_equals_an_unbroken_one(rank, size, saved_at):
    def fresh():
        return parameters(rank, size), PeriodicModelAverager(6, 1, delay=3, fragments=3)

    def run(weights, averager, steps):
        for step in steps:
            take_step(weights, rank, step)
            averager.average_parameters(weights)

    weights, averager = fresh()
    run(weights, averager, range(saved_at))
    saved = copy.deepcopy(([w.detach() for w in weights], averager.state_dict()))
    assert "under_way" in saved[1]
    run(weights, averager, range(saved_at, 12))
    unbroken = values(weights)
    averager.flush()  # the other one's rounds have the same names
    resumed, other = fresh()
    with torch.no_grad():
        for weight, value in zip(resumed, saved[0], strict=True):
            weight.copy_(value)
    other.load_state_dict(saved[1])
    assert other.state_dict().keys() == saved[1].keys(), "saved again before the first step"
    run(resumed, other, range(saved_at, 12))
    assert (values(resumed) == unbroken).all()


@on_gloo(2)
@pytest.mark.parametrize("fragments", [1, 3])
def test_a_round_of_a_checkpoint_ends_before_one_outside_the_schedule(rank, fragments):
    def resumed():
        weights, averager = parameters(rank, 2), PeriodicModelAverager(6, delay=4, fragments=fragments)
        averager.load_state_dict(saved)
        return weights, averager

    averager = PeriodicModelAverager(6, delay=4, fragments=fragments)
    averager.average_parameters(parameters(rank, 2))
    saved = copy.deepcopy(averager.state_dict())
    averager.flush()
    mean = start(2).mean(axis=0)
    weights, averager = resumed()
    averager.average_now(iter(weights))
    assert (values(weights) == mean).all()
    for _ in range(4):
        averager.average_parameters(weights)
    averager.flush()
    assert (values(weights) == mean).all()
    weights, averager = resumed()
    with averager.averaged(weights):
        assert (values(weights) == mean).all()
    changed = slice(0, 6 // fragments)  # by the round of the checkpoint: the first part
    assert (values(weights)[changed] == mean[changed]).all()
    _, averager = resumed()
    with pytest.raises(AveragingError, match="begins again once the parameters are known"):
        averager.flush()
    with pytest.raises(AveragingError, match="average_now"), averager:
        pass


@on_gloo(2)
def test_loading_gives_up_what_was_under_way(rank):
    weights = [torch.full((2,), float(rank))]
    averager = PeriodicModelAverager(4, delay=2)
    averager.average_parameters(weights)
    averager.load_state_dict({"step": 8})
    assert (weights[0] == rank).all() and averager.flush() is None
    for _ in range(3):
        averager.average_parameters(weights)
    assert (weights[0] == 0.5).all()


@on_gloo(2)
def test_ranks_with_other_delays_or_parameters_are_named(rank):
    weights = [torch.full((2,), float(rank))]
    with pytest.raises(LayoutMismatchError, match="delay=1.*delay=2"):
        PeriodicModelAverager(4, delay=1 + rank).average_parameters(weights)
    averager = PeriodicModelAverager(4, delay=1)
    with pytest.raises(LayoutMismatchError, match="shape"):
        averager.average_parameters([torch.zeros(2 + rank)])
    averager = PeriodicModelAverager(4, delay=1)
    averager.average_parameters(weights)
    with pytest.raises(AveragingError, match="flush"):
        averager.average_parameters([*weights, torch.zeros(1)])
    assert (weights[0] == rank).all()


@on_gloo(2)
@pytest.mark.parametrize("form", ["model", "named", "list"])
@pytest.mark.parametrize("fragments", [1, 2])
def test_a_change_never_goes_to_other_parameters_of_the_shape(rank, form, fragments):
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2, bias=False) for _ in range(3)])

    def trainable():
        chosen = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return {"model": model, "named": chosen, "list": [p for _, p in chosen]}[form]

    with torch.no_grad():
        for layer, value in zip(model, (rank, rank, 7.0), strict=True):
            layer.weight.fill_(value)
    model[2].weight.requires_grad_(False)
    averager = PeriodicModelAverager(4, delay=3, fragments=fragments)
    for _ in range(3):
        averager.average_parameters(trainable())
    before = [layer.weight.detach().clone() for layer in model[1:]]
    model[1].weight.requires_grad_(False), model[2].weight.requires_grad_(True)
    with pytest.raises(AveragingError, match="not those that this round began with"):
        for _ in range(3):
            averager.average_parameters(trainable())
    assert all(torch.equal(layer.weight, was) for layer, was in zip(model[1:], before, strict=True))


@on_gloo(2)
def test_parameters_replaced_under_their_names_get_the_change(rank):
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(rank)
    averager = PeriodicModelAverager(4, delay=1)
    averager.average_parameters(model)
    model.weight = torch.nn.Parameter(model.weight.detach() + 1)
    averager.average_parameters(model)
    assert (model.weight == 1.5).all()


@on_gloo(2)
def test_the_optimizer_and_flat_parameters_work_with_a_delay(rank):
    results = []
    for flat in (False, True):
        torch.manual_seed(rank)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        if flat:
            flatten_parameters(model)
        averager = PeriodicModelAverager(4, warmup_steps=2, delay=2, fragments=2)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager, None)
        numbers = torch.Generator().manual_seed(rank)
        for _ in range(9):
            optimizer.zero_grad()
            model(torch.randn(4, 3, generator=numbers)).square().mean().backward()
            optimizer.step()
        averager.average_now(model)
        assert check_replicas(model)
        results.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.equal(*results)


@on_gloo(2)
def test_what_cannot_be_delayed_says_so(rank):
    weights = [torch.zeros(2)]
    with pytest.raises(ValueError, match="delay is from 0 to 3 steps"):
        PeriodicModelAverager(4, delay=4)
    with pytest.raises(ValueError, match="fragments must divide the period, 4; 3 does not"):
        PeriodicModelAverager(4, fragments=3)
    with pytest.raises(ValueError, match="without delay"):
        PeriodicModelAverager(4, delay=1, buffers="average")
    averager = PeriodicModelAverager(4, delay=1)
    with pytest.raises(AveragingError, match="join.*delay=0"):
        averager.join(weights)
    with pytest.raises(ValueError, match="without delay"):
        PostLocalSGDOptimizer(torch.optim.SGD(weights), averager, None, optimizer_state="average")
    averager.average_parameters(weights)
    with pytest.raises(AveragingError, match="flush"):
        copy.deepcopy(averager)
    averager.flush()
    assert copy.deepcopy(averager).step == 1


@on_gloo(2, framework="tensorflow")
def test_tensorflow_has_fragments_but_no_delay(rank):
    import tensorflow as tf

    weights = [tf.Variable([float(rank)]) for _ in range(2)]
    averager = PeriodicModelAverager(2, fragments=2)
    seen = []
    for _ in range(2):
        averager.average_parameters(weights)
        seen.append([weight.numpy()[0] for weight in weights])
    assert seen == [[0.5, rank], [0.5, 0.5]]
    with pytest.raises(AveragingError, match="PyTorch only"):
        PeriodicModelAverager(2, delay=1).average_parameters(weights)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_fragments_are_balanced_and_complete(count):
    sizes = [1, 100, 3, 3, 90, 50, 60, 0, 7]
    layout = Layout(tuple(Entry(str(number), (size,), "float32") for number, size in enumerate(sizes)))
    parts = layout.fragments(count)
    assert [number for part in parts for number in part] == list(range(len(sizes)))
    largest = max(sum(sizes[number] for number in part) for part in parts)
    assert len(parts) == count and largest <= sum(sizes) / count + max(sizes)


def test_without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PeriodicModelAverager(4, delay=3, fragments=2)


@on_gloo(2)
def test_other_parameters_from_the_next_round_on(rank):
    weights = [torch.full((2,), float(rank))]
    averager = PeriodicModelAverager(2, delay=1)
    averager.average_parameters(weights)
    averager.average_parameters(weights)
    weights.append(torch.full((3,), 10.0 * rank))
    averager.average_parameters(weights)
    with torch.no_grad():
        weights[1].add_(1.0)
    assert len(averager.state_dict()["under_way"][0]["snapshot"]) == 2
    done = averager.average_parameters(weights)
    assert (done.step, done.tensors) == (2, 2) and (weights[0] == 0.5).all() and (weights[1] == 6.0).all()
