"""PostLocalSGDOptimizer is a true torch.optim.Optimizer to everything that PyTorch and Horovod do with one."""

from __future__ import annotations

import collections
import copy
import gc
import pickle
import types
import warnings

import horovod.torch as hvd
import pytest
import torch
import torch.distributed.optim
from test_post_local_sgd import batch, close, local, small_model

from hvd_averaging import PeriodicModelAverager, check_replicas
from hvd_averaging.torch import PostLocalSGDOptimizer


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


def train(model, optimizer, rank, steps, scheduler=None):
    for step in steps:
        optimizer.zero_grad()
        loss = model(batch(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step(*([step % 3] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))


def alone(size, steps, make=sgd, scheduler_of=None, seed=0):
    """One process that sees the batches of all ranks: what averaging gradients amounts to."""
    model = small_model(seed)
    optimizer = make(model)
    scheduler = scheduler_of(optimizer) if scheduler_of else None
    for step in steps:
        optimizer.zero_grad()
        (sum(model(batch(rank, step)).square().mean() for rank in range(size)) / size).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step(*([step % 3] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
    return model, optimizer


@pytest.mark.ranks(2, backends=("gloo",))
def test_it_is_the_wrapped_optimizer_to_all_who_look(rank):
    model = small_model()
    inner = sgd(model)
    optimizer = local(inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups and optimizer.defaults is inner.defaults
    train(model, optimizer, rank, range(2))
    assert optimizer.state is inner.state and len(optimizer.state) == 4
    optimizer.zero_grad(set_to_none=False)
    assert all((p.grad == 0).all() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert "PeriodicModelAverager" in repr(optimizer) and "momentum: 0.9" in repr(optimizer)
    assert type(optimizer).__module__ == "hvd_averaging.torch.optimizer"


@pytest.mark.ranks(2, backends=("gloo",))
def test_hooks_are_called_around_the_step_and_the_state(rank):
    model = small_model()
    optimizer, called = local(sgd(model)), []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda opt, *_: called.append(opt.averager.step))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {k: v for k, v in state.items() if k != "extra"})
    optimizer.register_load_state_dict_post_hook(lambda _: called.append("loaded"))
    train(model, optimizer, rank, range(2))
    state = optimizer.state_dict()
    assert state["extra"] == 1
    optimizer.load_state_dict(state)
    assert called == ["before", 1, "before", 2, "loaded"]


@pytest.mark.ranks(2, backends=("gloo",))
@pytest.mark.parametrize(
    "scheduler_of",
    [
        lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.5),
        lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.3, total_steps=10),
        lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=6),
        lambda opt: torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=1),
    ],
    ids=["StepLR", "OneCycleLR", "CosineAnnealingLR", "ReduceLROnPlateau"],
)
def test_schedulers(rank, size, scheduler_of):
    model = small_model()
    optimizer = local(sgd(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that the optimizer has taken no step yet
        train(model, optimizer, rank, range(7), scheduler_of(optimizer))
    expected, plain = alone(size, range(7), scheduler_of=scheduler_of)
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"] != 0.1
    assert optimizer.param_groups[0]["momentum"] == plain.param_groups[0]["momentum"]
    close(model.parameters(), expected.parameters(), rtol=1e-4, atol=1e-6)


@pytest.mark.ranks(2, backends=("gloo",))
@pytest.mark.parametrize(
    "make",
    [
        lambda model: sgd(model, foreach=True, nesterov=True),
        lambda model: sgd(model, fused=True),
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
        lambda model: torch.optim.Adam(model.parameters(), lr=0.01, foreach=True, amsgrad=True),
    ],
    ids=["SGD foreach", "SGD fused", "AdamW fused", "Adam foreach amsgrad"],
)
@pytest.mark.parametrize("optimizer_state", ["average", "reset"])
def test_implementations(rank, size, make, optimizer_state):
    model = small_model()
    optimizer = local(make(model), period=2, warmup_steps=4, optimizer_state=optimizer_state)
    train(model, optimizer, rank, range(4))
    close(model.parameters(), alone(size, range(4), make)[0].parameters(), rtol=1e-4, atol=1e-6)
    train(model, optimizer, rank, range(4, 7))
    assert optimizer.last_round.step == 6 and check_replicas(model)
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    assert check_replicas(tensors) and bool(tensors) == (optimizer_state == "average")


@pytest.mark.ranks(2, limit=120, backends=("gloo",))
def test_a_compiled_model(rank, size):
    model = small_model()
    optimizer = local(sgd(model), bucket_bytes=64)
    train(torch.compile(model, backend="aot_eager"), optimizer, rank, range(4))
    close(model.parameters(), alone(size, range(4))[0].parameters(), rtol=1e-4, atol=1e-6)


@pytest.mark.ranks(2)
def test_a_group_added_later_is_averaged_too(rank, size):
    model, late = small_model(), torch.nn.Parameter(torch.zeros(2))
    optimizer = local(torch.optim.SGD(model.parameters(), lr=1.0), period=2, warmup_steps=3, bucket_bytes=64)
    optimizer.step()
    optimizer.add_param_group({"params": [late], "lr": 0.5})
    for _ in range(2):
        optimizer.zero_grad()
        (late.sum() * 2 * rank).backward()
        optimizer.step()
    assert (late == -1.0).all(), "the mean gradient is 1, the rate 0.5"
    optimizer.zero_grad()
    (late.sum() * 2 * rank).backward()
    optimizer.step()
    assert optimizer.last_round.tensors == 5 and (late == -1.5).all()


@pytest.mark.ranks(2, backends=("gloo",))
def test_a_resumed_training_equals_an_unbroken_one(rank):
    def fresh():
        model = small_model()
        return model, local(sgd(model), period=3, warmup_steps=5)

    unbroken, optimizer = fresh()
    train(unbroken, optimizer, rank, range(7))
    saved = copy.deepcopy((unbroken.state_dict(), optimizer.state_dict()))
    assert saved[1]["averager"] == {"step": 7}
    train(unbroken, optimizer, rank, range(7, 12))
    resumed, other = fresh()
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(resumed, other, rank, range(7, 12))
    assert other.averager.step == 12 and other.last_round.step == 11
    close(resumed.parameters(), unbroken.parameters(), rtol=0, atol=0)


@pytest.mark.ranks(2, backends=("gloo",))
def test_a_checkpoint_without_the_averager(rank):
    model = small_model()
    optimizer = local(sgd(model))
    train(model, optimizer, rank, range(3))
    with pytest.warns(UserWarning, match="counting starts at 0"):
        optimizer.load_state_dict(optimizer.inner.state_dict())
    assert optimizer.averager.step == 0
    upstream = torch.distributed.optim.PostLocalSGDOptimizer(optimizer.inner, types.SimpleNamespace(step=5))
    optimizer.load_state_dict(upstream.state_dict())
    assert optimizer.averager.step == 5


@pytest.mark.ranks(2, backends=("gloo",))
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_goes_on_like_the_original(rank, duplicate):
    model = small_model()
    optimizer = local(sgd(model), period=2, warmup_steps=3, bucket_bytes=64)
    train(model, optimizer, rank, range(2))
    twin, other = duplicate((model, optimizer))
    assert other.param_groups[0]["params"][0] is twin[0].weight and other.averager is not optimizer.averager
    train(model, optimizer, rank, range(2, 6))
    assert other.averager.step == 2
    train(twin, other, rank, range(2, 6))
    assert other.averager.step == 6 and other.last_round.step == 5
    close(twin.parameters(), model.parameters(), rtol=0, atol=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [sgd, lambda model: torch.optim.Adam(model.parameters(), weight_decay=0.1)])
@pytest.mark.parametrize("trained", ["rank 0", "nowhere"])
def test_horovod_broadcasts_its_state(rank, make, trained):
    model = small_model(seed=rank)
    inner = make(model)
    if rank == 0 and trained == "rank 0":
        train(model, inner, rank, range(3))
        inner.param_groups[0]["lr"] = 0.03
    optimizer = local(inner)
    before = [p.detach().clone() for p in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    close(model.parameters(), before, rtol=0, atol=0)
    assert optimizer.averager.step == 0
    assert optimizer.param_groups[0]["lr"] == (0.03 if trained == "rank 0" else inner.defaults["lr"])
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert len(states) >= 4 and check_replicas(states)
    assert any(state.any() for state in states) == (trained == "rank 0")
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(model, optimizer, rank, range(2))
    assert check_replicas(model)


@pytest.mark.ranks(2, backends=("gloo",))
def test_it_leaves_no_trace_when_it_is_gone(rank):
    model = small_model()
    optimizer = local(sgd(model))
    train(model, optimizer, rank, range(2))
    del optimizer
    again = local(sgd(model))
    train(model, again, rank, range(2))
    assert again.averager.step == 2
    del again
    gc.collect()
    assert not model[0].weight._post_accumulate_grad_hooks


@pytest.mark.ranks(2, backends=("gloo",))
def test_state_and_groups_can_be_replaced(rank):
    model = small_model()
    optimizer = local(sgd(model))
    train(model, optimizer, rank, range(2))
    optimizer.state = collections.defaultdict(dict)
    optimizer.param_groups = optimizer.param_groups[:1]
    assert not optimizer.inner.state and optimizer.param_groups is optimizer.inner.param_groups
    train(model, optimizer, rank, range(2, 4))
    assert len(optimizer.state) == 4 and check_replicas(model)


@pytest.mark.ranks(2, backends=("gloo",))
def test_wrong_arguments(rank):
    model = small_model()
    averager = PeriodicModelAverager(4)
    with pytest.raises(TypeError, match="optimizer is a Sequential"):
        PostLocalSGDOptimizer(model, averager)
    with pytest.raises(TypeError, match="averager is a int|averager is an int"):
        PostLocalSGDOptimizer(sgd(model), 4)
    with pytest.raises(ValueError, match="'local', 'average', 'reset'"):
        PostLocalSGDOptimizer(sgd(model), averager, None, optimizer_state="mean")
    with pytest.raises(ValueError, match='"node"'):
        PostLocalSGDOptimizer(sgd(model), averager, "host")
    with pytest.raises(TypeError, match="ProcessSet"):
        PostLocalSGDOptimizer(sgd(model), averager, [0, 1])
    with pytest.raises(ValueError, match="L-BFGS"):
        PostLocalSGDOptimizer(torch.optim.LBFGS(model.parameters()), averager, None, optimizer_state="average")
    with pytest.raises(ValueError, match="model="):
        PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(4, buffers="average"), None)
    with pytest.raises(TypeError, match="twice"):
        PostLocalSGDOptimizer(local(sgd(model)), averager, None)
