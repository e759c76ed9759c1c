"""PostLocalSGDOptimizer trains as the paper says, step by step, and averages gradients as it should."""

from __future__ import annotations

import functools
import socket
import textwrap
import warnings

import horovod.torch as hvd
import numpy as np
import pytest
import reference
import torch

from hvd_averaging import (
    AveragingError,
    LayoutMismatchError,
    PeerError,
    PeriodicModelAverager,
    check_replicas,
    process_sets,
)
from hvd_averaging.torch import PostLocalSGDOptimizer

dynamic = functools.partial(pytest.mark.ranks, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
on_gloo = functools.partial(pytest.mark.ranks, backends=("gloo",))

FEATURES, ROWS = 5, 3


def data(rank, step):
    """A batch of linear regression, different on every rank and at every step."""
    numbers = np.random.default_rng([rank, step])
    return numbers.normal(size=(ROWS, FEATURES)), numbers.normal(size=ROWS)


def gradient(step, replicas):
    """NumPy: of the mean squared error, on every rank's own batch."""
    rows = []
    for rank, weights in enumerate(replicas):
        inputs, targets = data(rank, step)
        rows.append(2 / ROWS * inputs.T @ (inputs @ weights - targets))
    return np.stack(rows)


def loss_of(weights, rank, step):
    inputs, targets = map(torch.tensor, data(rank, step))
    return (inputs @ weights - targets).square().mean()


def start(size):
    return np.tile(np.linspace(-1, 1, FEATURES), (size, 1))


def parameter():
    return torch.nn.Parameter(torch.tensor(start(1)[0]))


def small_model(seed=0, width=8):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 2))


def batch(rank, step=0):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1000 * rank + step))


def local(optimizer, period=4, warmup_steps=100, **options):
    """Gradients averaged for the first ``warmup_steps`` steps, then none."""
    averager = PeriodicModelAverager(period, warmup_steps, timeout=20)
    return PostLocalSGDOptimizer(optimizer, averager, gradient_process_set=None, **options)


def gradient_of_all(model, size, step=0, loss=lambda output: output.square().mean()):
    """The mean gradient over the batches of all ranks, in one process."""
    losses = [loss(model(batch(rank, step))) for rank in range(size)]
    return torch.autograd.grad(sum(losses) / size, list(model.parameters()))


def close(found, expected, **tolerance):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


# ---- the algorithm ------------------------------------------------------------------------------------------------


@on_gloo(2, 4)
@pytest.mark.parametrize("optimizer_state", ["local", "average", "reset"])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_every_step_follows_the_reference(rank, size, kind, optimizer_state):
    weights = parameter()
    if kind == "sgd":
        inner, update = torch.optim.SGD([weights], lr=0.1, momentum=0.9), reference.sgd(0.1, 0.9)
    else:
        inner, update = torch.optim.Adam([weights], lr=0.05), reference.adam(0.05)
    expected = reference.post_local_sgd(start(size), 13, 3, 4, gradient, update, (), optimizer_state)
    optimizer = local(inner, period=3, warmup_steps=4, optimizer_state=optimizer_state)
    for step in range(13):
        optimizer.zero_grad()
        loss_of(weights, rank, step).backward()
        optimizer.step()
        np.testing.assert_allclose(weights.detach().numpy(), expected[step][rank], rtol=1e-10, atol=1e-12)
    assert optimizer.averager.step == 13
    assert optimizer.last_round.step == 10


@dynamic(4)
def test_gradients_are_averaged_within_the_node_after_warm_up(rank, size, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: f"node{rank // 2}")
    weights = parameter()
    expected = reference.post_local_sgd(
        start(size), 12, 4, 3, gradient, reference.sgd(0.1, 0.9), [range(2), range(2, 4)]
    )
    averager = PeriodicModelAverager(4, warmup_steps=3)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD([weights], lr=0.1, momentum=0.9), averager)
    assert optimizer.gradient_process_set.ranks == [rank // 2 * 2, rank // 2 * 2 + 1]
    for step in range(12):
        optimizer.zero_grad()
        loss_of(weights, rank, step).backward()
        optimizer.step()
        np.testing.assert_allclose(weights.detach().numpy(), expected[step][rank], rtol=1e-10, atol=1e-12)


@dynamic(4)
def test_an_averager_of_some_ranks_keeps_to_them(rank, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: f"node{rank // 2}")
    some = process_sets.of([1, 2, 3])
    weights = torch.nn.Parameter(torch.zeros(1))
    averager = PeriodicModelAverager(2, warmup_steps=1, process_set=some)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD([weights], lr=1.0), averager)
    seen = []
    for _ in range(2):
        weights.grad = torch.tensor([-float(10**rank)])
        optimizer.step()
        seen.append(round(weights.item()))
    # First gradients of {1, 2, 3}; then gradients of {2, 3} and of {1} alone, and parameters of {1, 2, 3}.
    assert seen == ([370, 740] if rank else [1, 2])


@on_gloo(2)
def test_one_host_gets_a_warning_not_silence(rank):
    averager = PeriodicModelAverager(4)
    with pytest.warns(UserWarning, match="All ranks are on one host.*gradient_process_set=None"):
        PostLocalSGDOptimizer(torch.optim.SGD([parameter()], lr=0.1), averager)


# ---- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("bucket_bytes", [None, 16, 100, 2**20])
def test_any_bucket_size_gives_the_mean_gradient(rank, size, bucket_bytes):
    model = small_model()
    optimizer = local(torch.optim.SGD(model.parameters(), lr=0.0), bucket_bytes=bucket_bytes)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        close([p.grad for p in model.parameters()], gradient_of_all(model, size, step))


@on_gloo(2)
def test_gradients_set_out_during_backward(rank):
    model = small_model()
    optimizer = local(torch.optim.SGD(model.parameters(), lr=0.0), bucket_bytes=64)
    under_way = []
    model[0].weight.register_hook(lambda _: under_way.append(len(optimizer._rounds._reduction._under_way)))
    for step in range(2):
        optimizer.zero_grad()
        if step == 1:
            model(batch(rank)).square().mean().backward()
        optimizer.step()
    assert under_way[0] >= 1, "the last layer's gradients, before the first layer's are there"


@pytest.mark.ranks(2)
def test_a_missing_gradient_counts_as_zeros_and_one_missing_everywhere_stays_missing(rank):
    branches = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(3))
    for branch in branches:
        torch.nn.init.ones_(branch.weight)
    optimizer = local(torch.optim.SGD(branches.parameters(), lr=1.0, weight_decay=0.5))
    for _ in range(2):
        optimizer.zero_grad()
        branches[rank](torch.ones(1, 2)).sum().backward()
        optimizer.step()
    first, second, unused = (branch.weight for branch in branches)
    assert (first.grad == 0.5).all() and (second.grad == 0.5).all()
    assert unused.grad is None and (unused == 1).all(), "without a gradient there is no weight decay either"


@on_gloo(2)
def test_accumulated_gradients_are_sent_once(rank, size):
    model = small_model()
    optimizer = local(torch.optim.SGD(model.parameters(), lr=0.0))
    for step in range(2):
        optimizer.zero_grad()
        with optimizer.no_sync():
            for micro in range(3):
                model(batch(rank, 10 * step + micro)).square().mean().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(batch(rank, 10 * step + 3)).square().mean().backward()
            optimizer.step()
        parts = [gradient_of_all(model, size, 10 * step + micro) for micro in range(4)]
        close([p.grad for p in model.parameters()], [sum(part) for part in zip(*parts, strict=True)])


@on_gloo(2)
def test_period_three_and_four_micro_batches_make_twelve(rank):
    model = small_model(seed=rank)
    optimizer = local(torch.optim.SGD(model.parameters(), lr=0.1), period=3, warmup_steps=2)
    rounds = []
    for micro in range(1, 25):
        if micro % 4:
            with optimizer.no_sync():
                model(batch(rank, micro)).square().mean().backward()
            continue
        model(batch(rank, micro)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.last_round and (not rounds or optimizer.last_round.step != rounds[-1][0]):
            rounds.append((optimizer.last_round.step, micro))
    assert rounds == [(2, 12), (5, 24)]


@on_gloo(2)
@pytest.mark.parametrize("where", ["everywhere", "rank 1"])
def test_a_second_backward_is_noticed(rank, size, where):
    model = small_model()
    optimizer = local(torch.optim.SGD(model.parameters(), lr=0.0), bucket_bytes=64)
    again = where == "everywhere" or rank == 1
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        if again:
            model(batch(rank, step)).square().mean().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        # In the first step nothing is sent early, since there is no agreed layout yet.
        assert sum("no_sync" in str(warning.message) for warning in caught) == (again and step == 1)
        single = small_model()
        losses = [
            single(batch(r, step)).square().mean() * (2 if where == "everywhere" or r == 1 else 1) for r in range(size)
        ]
        close([p.grad for p in model.parameters()], torch.autograd.grad(sum(losses) / size, list(single.parameters())))


@on_gloo(2)
def test_two_parameters_on_one_memory_have_a_gradient_each(rank, size):
    weight = torch.randn(3, generator=torch.Generator().manual_seed(0))
    one, other = torch.nn.Parameter(weight), torch.nn.Parameter(weight)
    optimizer = local(torch.optim.SGD([one, other], lr=0.0))
    for _ in range(3):  # the first agrees, the others send early
        optimizer.zero_grad()
        ((rank + 1) * one + (10 * rank) * other).sum().backward()
        optimizer.step()
        close([one.grad, other.grad], [torch.full((3,), 1.5), torch.full((3,), 5.0)])


@on_gloo(2)
def test_clipping_after_synchronize_clips_the_mean(rank, size):
    model = small_model()
    optimizer = local(torch.optim.SGD(model.parameters(), lr=0.0))
    for step in range(2):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with optimizer.skip_synchronize():  # as scripts for horovod.torch do
            optimizer.step()
        mean = gradient_of_all(model, size, step)
        norm = torch.sqrt(sum(part.square().sum() for part in mean))
        close([p.grad for p in model.parameters()], [part * 0.01 / (norm + 1e-6) for part in mean])


@on_gloo(2)
def test_clipping_without_synchronize_averages_what_was_clipped(rank, size):
    model = small_model()
    optimizer = local(torch.optim.SGD(model.parameters(), lr=0.0), bucket_bytes=64)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        with pytest.warns(UserWarning, match="synchronize") if step == 1 else warnings.catch_warnings():
            optimizer.step()
        each = [
            torch.autograd.grad(model(batch(r, step)).square().mean(), list(model.parameters())) for r in range(size)
        ]
        clipped = [sum(part.clamp(-0.01, 0.01) for part in parts) / size for parts in zip(*each, strict=True)]
        close([p.grad for p in model.parameters()], clipped)


@pytest.mark.ranks(2)
def test_sparse_gradients_are_refused_on_all_ranks(rank):
    torch.manual_seed(0)
    table = torch.nn.Embedding(5, 2, sparse=rank == 1)
    optimizer = local(torch.optim.SGD(table.parameters(), lr=1.0))
    before = table.weight.detach().clone()
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(
        TypeError if rank else PeerError, match="sparse=False" if rank else "rank 1 could not take part"
    ):
        optimizer.step()
    assert torch.equal(table.weight, before) and optimizer.averager.step == 0
    optimizer.zero_grad()
    table.sparse = False
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert optimizer.averager.step == 1 and check_replicas(table)


@on_gloo(2, limit=60)
def test_a_rank_at_another_step_is_named(rank):
    model = small_model()
    optimizer = local(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.averager.step = 3 + rank
    model(batch(rank)).square().mean().backward()
    with pytest.raises(AveragingError, match="rank 0 at step 3, rank 1 at step 4"):
        optimizer.step()


# ---- closures -----------------------------------------------------------------------------------------------------


def closure_of(model, optimizer, rank, size, step=0):
    def closure():
        optimizer.zero_grad()
        loss = model(batch(rank, step)).square().mean()
        loss.backward()
        return loss

    return closure


@on_gloo(2)
def test_a_closure_returns_the_mean_loss(rank, size):
    model = small_model()
    optimizer = local(torch.optim.SGD(model.parameters(), lr=0.0))
    loss = optimizer.step(closure_of(model, optimizer, rank, size))
    expected = sum(model(batch(r)).square().mean() for r in range(size)) / size
    torch.testing.assert_close(loss, expected.detach())
    close([p.grad for p in model.parameters()], gradient_of_all(model, size))


@on_gloo(2, 4)
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_is_that_of_all_data_together(rank, size, line_search):
    model, single = small_model(), small_model()
    options = {"lr": 0.5, "max_iter": 5, "line_search_fn": line_search}
    optimizer = local(torch.optim.LBFGS(model.parameters(), **options))
    alone = torch.optim.LBFGS(single.parameters(), **options)

    def closure():
        alone.zero_grad()
        loss = sum(single(batch(r)).square().mean() for r in range(size)) / size
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure_of(model, optimizer, rank, size))
        alone.step(closure)
        assert check_replicas(model)
    close(model.parameters(), single.parameters(), rtol=1e-3, atol=1e-4)


@on_gloo(2)
def test_lbfgs_on_its_own_may_take_any_number_of_evaluations(rank, size):
    model = small_model()
    optimizer = local(
        torch.optim.LBFGS(model.parameters(), max_iter=2 + 5 * rank), 2, warmup_steps=0, optimizer_state="reset"
    )
    for step in range(3):
        optimizer.step(closure_of(model, optimizer, rank, size, step))
    assert optimizer.last_round.step == 2 and check_replicas(model)


# ---- mixed precision ----------------------------------------------------------------------------------------------


@on_gloo(2)
@pytest.mark.parametrize("warmup_steps", [0, 100])
@pytest.mark.parametrize("synchronize", [False, True])
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(rank, size, warmup_steps, synchronize):
    weights = parameter()
    optimizer = local(torch.optim.SGD([weights], lr=0.1), period=3, warmup_steps=warmup_steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    taken = [step for step in range(9) if step not in (2, 5)]
    moves = reference.post_local_sgd(
        start(size), len(taken), 3, warmup_steps, lambda number, w: gradient(taken[number], w), reference.sgd(0.1)
    )
    for step in range(9):
        optimizer.zero_grad()
        scaler.scale(loss_of(weights, rank, step)).backward()
        if step in (2, 5) and rank == 1:
            weights.grad[0] = float("inf")
        if synchronize:
            optimizer.synchronize()
        before = weights.detach().clone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scaler.step(optimizer)
        scaler.update()
        if step in (2, 5):
            assert torch.equal(weights, before)
        else:
            np.testing.assert_allclose(weights.detach().numpy(), moves[taken.index(step)][rank], rtol=1e-6)
    assert optimizer.averager.step == len(taken)


# ---- how a job ends -----------------------------------------------------------------------------------------------


def test_an_exception_between_backward_and_step_ends_the_job(horovodrun):
    script = """
        import torch, horovod.torch as hvd
        from hvd_averaging import PeriodicModelAverager
        from hvd_averaging.torch import PostLocalSGDOptimizer
        hvd.init()
        model = torch.nn.Linear(4, 4)
        averager = PeriodicModelAverager(4, warmup_steps=100, timeout=20)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager, None, bucket_bytes=16)
        for step in range(5):
            model(torch.ones(1, 4)).sum().backward()
            if step == 3 and hvd.rank() == 1:
                raise ValueError("a bad batch")
            optimizer.step()
    """
    done = horovodrun(2, textwrap.dedent(script), limit=40)
    assert done.returncode != 0 and not done.timed_out
    assert "ValueError: a bad batch" in done.output


@on_gloo(2)
def test_a_group_that_one_rank_adds_is_named(rank):
    model = small_model()
    optimizer = local(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.step()
    if rank == 1:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    with pytest.raises(LayoutMismatchError, match="group1.0"):
        optimizer.step()
    assert hvd.size() == 2


@on_gloo(2)
@pytest.mark.parametrize("optimizer_state", ["local", "average", "reset"])
def test_ranks_with_fewer_batches_join(rank, optimizer_state):
    model = small_model(seed=rank)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = local(inner, period=3, warmup_steps=1, optimizer_state=optimizer_state)
    for step in range(5 + 4 * rank):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    done = optimizer.join()
    assert done is optimizer.last_round and optimizer.averager.step == 9 and check_replicas(model)
    assert bool(optimizer.state) == (optimizer_state != "reset")


@on_gloo(2)
def test_join_is_refused_while_others_wait_for_gradients(rank):
    optimizer = local(torch.optim.SGD(small_model().parameters(), lr=0.1))
    with pytest.raises(AveragingError, match="after warm-up and with gradient_process_set=None"):
        optimizer.join()


# ---- what took part, and what was sent ----------------------------------------------------------------------------


@on_gloo(2)
def test_frozen_parameters_leave_the_others_averaged(rank, size):
    model, single = small_model(), small_model()
    optimizer = local(torch.optim.SGD(model.parameters(), lr=0.1), bucket_bytes=64)
    alone = torch.optim.SGD(single.parameters(), lr=0.1)
    for step in range(9):
        for each in (model, single):
            each[2].bias.requires_grad_(step >= 3)
            each[0].weight.requires_grad_(step < 6)
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        alone.zero_grad()
        (sum(single(batch(r, step)).square().mean() for r in range(size)) / size).backward()
        alone.step()
        assert check_replicas(model)
        close(model.parameters(), single.parameters())


@on_gloo(2)
def test_two_models_that_are_alike_have_gradients_under_way_at_once(rank, size):
    models = [small_model(seed=seed) for seed in (1, 2)]
    optimizers = [local(torch.optim.SGD(model.parameters(), lr=0.0), bucket_bytes=64) for model in models]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(model(batch(rank, step)).square().mean() for model in models).backward()
        for optimizer in optimizers:
            optimizer.step()
        for model in models:
            close([p.grad for p in model.parameters()], gradient_of_all(model, size, step))


@on_gloo(2)
def test_a_change_that_autograd_does_not_see_is_noticed(rank, size):
    model = small_model()
    optimizer = local(torch.optim.SGD(model.parameters(), lr=0.0), bucket_bytes=64)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad.data.mul_(0.5)
        with pytest.warns(UserWarning, match="synchronize") if step == 1 else warnings.catch_warnings():
            optimizer.step()
        close([2 * p.grad for p in model.parameters()], gradient_of_all(model, size, step))


@on_gloo(2)
@pytest.mark.parametrize("synchronize", [False, True])
def test_gradients_that_a_scaler_has_unscaled_early(rank, size, synchronize):
    model = small_model()
    optimizer = local(torch.optim.SGD(model.parameters(), lr=0.0), bucket_bytes=64)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(batch(rank, step)).square().mean()).backward()
        scaler.unscale_(optimizer)
        with pytest.warns(UserWarning, match="synchronize") if step == 1 else warnings.catch_warnings():
            if synchronize:
                optimizer.synchronize()
            scaler.step(optimizer)
        scaler.update()
        close([p.grad for p in model.parameters()], gradient_of_all(model, size, step))


@dynamic(2, backends=("gloo",))
def test_a_gradient_process_set_of_one_rank_needs_no_registration(rank):
    model = small_model(seed=rank)
    averager = PeriodicModelAverager(2, warmup_steps=1, timeout=20)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager, process_sets.of([1]))
    for step in range(4):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    assert optimizer.last_round.step == 3 and check_replicas(model)


# ---- the optimizer's state ----------------------------------------------------------------------------------------


@on_gloo(2)
@pytest.mark.parametrize("kind", ["NAdam", "ASGD", "Rprop", "Adafactor"])
def test_a_period_of_one_on_equal_data_changes_no_trajectory(rank, kind):
    model, single = small_model(), small_model()
    inner, alone = (getattr(torch.optim, kind)(each.parameters(), lr=0.01) for each in (model, single))
    optimizer = local(inner, period=1, warmup_steps=0, optimizer_state="average")
    for step in range(6):
        for each, taken in ((model, optimizer), (single, alone)):
            taken.zero_grad()
            each(batch(0, step)).square().mean().backward()
            if step < 3:
                each[0].weight.grad = None  # has no state yet when the others are averaged
            taken.step()
    close(model.parameters(), single.parameters(), rtol=1e-5, atol=1e-7)


@on_gloo(2)
def test_a_rank_without_any_gradient_brings_the_state_of_a_fresh_optimizer(rank):
    model = small_model()
    optimizer = local(torch.optim.Adam(model.parameters()), period=1, warmup_steps=0, optimizer_state="average")
    if rank == 0:
        model(batch(rank)).square().mean().backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert len(states) == 12 and check_replicas(states) and check_replicas(model)


@on_gloo(2)
@pytest.mark.parametrize("make", [functools.partial(torch.optim.SGD, momentum=0.9), torch.optim.Adam])
def test_the_state_of_a_parameter_without_dimensions_is_averaged_like_any(rank, make):
    scalar, vector = torch.nn.Parameter(torch.tensor(1.0)), torch.nn.Parameter(torch.tensor([1.0]))
    inner = make([scalar, vector], lr=0.1)
    optimizer = local(inner, period=2, warmup_steps=1, optimizer_state="average")
    for _ in range(1 + rank):  # so that the ranks count differently
        optimizer.zero_grad()
        scalar.grad, vector.grad = torch.tensor(4.0 * rank - 1), torch.tensor([4.0 * rank - 1])
        inner.step()
    optimizer.step()
    optimizer.step()
    assert torch.equal(scalar.detach(), vector.detach()[0])
    assert check_replicas([value for state in inner.state.values() for value in state.values()])
    for key, value in inner.state[scalar].items():
        assert float(value) == float(inner.state[vector][key]), key
