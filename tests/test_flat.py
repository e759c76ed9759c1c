"""Parameters in one piece of memory: they stay what they were, and are averaged where they lie, or packed again."""

from __future__ import annotations

import copy
import functools
import io
import warnings

import horovod.torch as hvd
import pytest
import torch

from hvd_averaging import HierarchicalModelAverager, PeriodicModelAverager, StepMismatchError, average_parameters
from hvd_averaging.adapters.torch_flat import FlatReduction
from hvd_averaging.torch import PostLocalSGDOptimizer, flatten_parameters

dynamic = functools.partial(pytest.mark.ranks, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
on_gloo = functools.partial(pytest.mark.ranks, backends=("gloo",))


class Net(torch.nn.Module):
    """All kinds of strides, a tied weight, a frozen one, a scalar, and nothing at all."""

    def __init__(self, rank=0, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(rank)
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.first = torch.nn.Linear(4, 6)
        self.second = torch.nn.Linear(4, 6)
        self.second.weight = self.first.weight
        self.turned = torch.nn.Parameter(torch.randn(5, 2).t())
        self.scale = torch.nn.Parameter(torch.randn(()))
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))
        self.frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)
        self.to(dtype=dtype, memory_format=torch.channels_last)

    def forward(self, images):
        features = torch.tanh(self.conv(images).mean((2, 3)))
        return self.scale * self.second(features) + self.turned.sum()


def images(rank, step=0):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(2, 3, 5, 5, generator=generator).to(memory_format=torch.channels_last)


def train(model, optimizer, rank, steps, averager=None):
    for step in steps:
        optimizer.zero_grad()
        model(images(rank, step)).square().mean().backward()
        optimizer.step()
        if averager is not None:
            averager.average_parameters(model)


def is_flat(averager):
    return isinstance(averager._rounds._agreed.reduction, FlatReduction)


def equal(model, expected):
    return all(torch.equal(one, other) for one, other in zip(model.parameters(), expected, strict=True))


def close(model, expected):
    """Up to the order in which more than two ranks are summed, which depends on where a parameter lies."""
    return all(
        torch.allclose(p, e, rtol=1e-5, atol=1e-6)
        for p, e in zip(model.parameters(), expected.parameters(), strict=True)
    )


def test_parameters_stay_what_they_were():
    model = Net()
    before = {name: (p, p.detach().clone(), p.stride(), p.requires_grad) for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 0, range(1))
    state = {id(p): value["momentum_buffer"] for p, value in optimizer.state.items()}
    heard = []
    model.scale.register_hook(heard.append)
    values = [p.detach().clone() for p in model.parameters()]
    (flat,) = flatten_parameters(model)
    assert equal(model, values)
    for name, parameter in model.named_parameters():
        original, _, stride, requires_grad = before[name]
        assert parameter is original and parameter.stride() == stride and parameter.requires_grad == requires_grad
    assert model.second.weight is model.first.weight
    assert flat.numel() == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert all(optimizer.state[p]["momentum_buffer"] is state[id(p)] for p in optimizer.state)
    model(images(0)).sum().backward()
    assert len(heard) == 1
    flat.zero_()
    assert all((p == 0).all() for p in model.parameters() if p.requires_grad)
    assert equal(model, [p if p.requires_grad else before["frozen"][1] for p in model.parameters()])


def test_checkpoints_have_normal_sizes():
    def size(state):
        file = io.BytesIO()
        torch.save(state, file)
        return len(file.getvalue())

    model = torch.nn.Sequential(torch.nn.Linear(10, 2), torch.nn.Linear(1000, 1000))
    before = size(model.state_dict()), size(model[0].state_dict())
    flatten_parameters(model)
    after = size(model.state_dict()), size(model[0].state_dict())
    assert [abs(one - other) < 1000 for one, other in zip(before, after, strict=True)] == [True, True]


def test_gradients_can_be_flat_too():
    model = Net()
    model.scale.grad = torch.tensor(2.0)
    (flat,) = flatten_parameters(model, gradients=True)
    assert flat.sum() == 2
    model.zero_grad(set_to_none=False)
    model(images(0)).sum().backward()
    everything = sum(p.grad.square().sum() for p in model.parameters() if p.requires_grad)
    torch.testing.assert_close(flat.square().sum(), everything)
    assert model.conv.weight.grad.stride() == model.conv.weight.stride()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_round_over_flat_parameters_is_a_packed_round(rank, dtype):
    flat, packed = Net(rank, dtype), Net(rank, dtype)
    flatten_parameters(flat)
    addresses = [p.data_ptr() for p in flat.parameters()]
    averager = PeriodicModelAverager(period=1)
    assert averager.average_parameters(flat) and is_flat(averager)
    average_parameters(packed)
    assert close(flat, packed)
    assert [p.data_ptr() for p in flat.parameters()] == addresses


@on_gloo(2)
@pytest.mark.parametrize("who", [{0}, {0, 1}])
@pytest.mark.parametrize(
    "move",
    [
        lambda model: (
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True),
            setattr(model.second, "weight", model.first.weight),
        ),
        lambda model: model.to(torch.float64).to(torch.float32),
        lambda model: setattr(model.first.weight, "data", model.first.weight.data.clone()),
    ],
    ids=["load assign", "to and back", "data"],
)
def test_parameters_that_were_moved_are_packed_again(rank, who, move):
    model = Net(rank)
    flatten_parameters(model)
    averager = PeriodicModelAverager(period=1)
    averager.average_parameters(model)
    if rank in who:
        move(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    expected = [p + 0.5 - rank if p.requires_grad else p for p in model.parameters()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            averager.average_parameters(model)
    assert not is_flat(averager)
    assert sum("flatten_parameters once more" in str(one.message) for one in caught) == (rank in who)
    for parameter, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value.detach())


@on_gloo(2)
@pytest.mark.parametrize("who", [{1}, {0, 1}])
@pytest.mark.parametrize("replaced", [["weight"], ["bias"], ["weight", "bias"]])
def test_other_parameters_on_the_same_memory(rank, who, replaced):
    model = torch.nn.Linear(3, 2)
    flatten_parameters(model)
    averager = PeriodicModelAverager(period=1, timeout=20)
    averager.average_parameters(model)
    if rank in who:
        for name in replaced:
            setattr(model, name, torch.nn.Parameter(getattr(model, name).data))
    for step in range(2):
        with torch.no_grad():
            model.weight.fill_(rank + step), model.bias.fill_(2.0 * rank)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "PeriodicModelAverager: the parameters no longer lie")
            averager.average_parameters(model)
        assert (model.weight == 0.5 + step).all() and (model.bias == 1.0).all()
    assert is_flat(averager) == (len(replaced) == 1)


@on_gloo(2)
def test_a_copy_and_another_dtype_are_packed(rank):
    model = Net(rank)
    flatten_parameters(model)
    twin = copy.deepcopy(model)
    for changed in (twin, twin.half()):
        expected = [p.detach().clone() for p in changed.parameters()]
        averager = PeriodicModelAverager(period=1)
        averager.average_parameters(changed)
        assert not is_flat(averager)
        average_parameters(expected)
        assert equal(
            changed, [e if p.requires_grad else p for e, p in zip(expected, changed.parameters(), strict=True)]
        )


@on_gloo(2)
@pytest.mark.parametrize("who", [{1}, {0, 1}])
def test_flattening_in_mid_training_is_noticed(rank, who):
    model, packed = Net(rank), Net(rank)
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, packed))
    averager, other = PeriodicModelAverager(2), PeriodicModelAverager(2)
    train(model, optimizer, rank, range(3), averager)
    if rank in who:
        flatten_parameters(optimizer)
    train(model, optimizer, rank, range(3, 8), averager)
    train(packed, plain, rank, range(8), other)
    assert is_flat(averager) == (who == {0, 1})
    assert equal(model, packed.parameters())


@on_gloo(2)
def test_another_order_than_the_flat_one_is_packed(rank):
    model = Net(rank)
    flatten_parameters(model)
    expected = [p.detach().clone() for p in model.parameters()]
    averager = PeriodicModelAverager(period=1)
    backwards = [p for p in reversed(list(model.parameters())) if p.requires_grad]
    averager.average_parameters(backwards)
    assert not is_flat(averager)
    average_parameters(expected)
    assert equal(model, [e if p.requires_grad else p for e, p in zip(expected, model.parameters(), strict=True)])


@on_gloo(2)
def test_ranks_at_different_steps_leave_flat_parameters_alone(rank):
    model = Net(rank)
    flatten_parameters(model)
    averager = PeriodicModelAverager(period=1)
    averager.average_parameters(model)
    averager.step += rank
    with torch.no_grad():
        model.scale.fill_(float(rank))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(StepMismatchError, match="rank 0 at step 1, rank 1 at step 2"):
        averager.average_parameters(model)
    assert equal(model, before)
    averager.step = 5
    averager.average_parameters(model)
    assert model.scale == 0.5


@pytest.mark.ranks(3)
def test_joined_ranks_do_not_shrink_flat_parameters(rank):
    model = torch.nn.Linear(2, 2)
    flatten_parameters(model)
    with torch.no_grad():
        model.weight.fill_(float(rank))
    averager = PeriodicModelAverager(period=1)
    averager.average_parameters(model)
    assert (model.weight == 1).all()
    for _ in range(rank):
        with torch.no_grad():
            model.weight.fill_(10.0 * rank)
        averager.average_parameters(model)
    averager.join(model)
    assert averager.step == 3 and (model.weight == model.weight[0, 0]).all()
    with torch.no_grad():
        model.weight.fill_(float(rank))
    if rank == 0:
        hvd.join()
    else:
        averager.average_parameters(model)
        hvd.join()
        assert (model.weight == 1.5).all()


@on_gloo(2)
def test_autograd_notices_a_round_between_forward_and_backward(rank):
    model = Net(rank)
    flatten_parameters(model)
    output = model(images(rank))
    average_parameters(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@dynamic(4)
def test_every_level_of_a_hierarchy_works_in_place(rank):
    flat, packed = Net(rank), Net(rank)
    flatten_parameters(flat)
    for model in (flat, packed):
        averager = HierarchicalModelAverager({1: 2, 2: 4}, warmup_steps=1)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(5), averager)
    assert close(flat, packed)


@pytest.mark.ranks(2, limit=90, backends=("gloo",))
@pytest.mark.parametrize("implementation", [{}, {"foreach": True}, {"fused": True}], ids=["for", "foreach", "fused"])
def test_training_is_bit_for_bit_that_of_separate_parameters(rank, implementation):
    results = []
    for flattened in (False, True):
        torch.manual_seed(rank)
        net = Net(rank)
        lstm = torch.nn.LSTM(6, 3, 2)
        model = torch.nn.ModuleDict({"net": net, "lstm": lstm})
        if flattened:
            flatten_parameters(model)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01, **implementation)
        averager = PeriodicModelAverager(2, warmup_steps=2)
        optimizer = PostLocalSGDOptimizer(inner, averager, None, optimizer_state="average")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        compiled = torch.compile(net, backend="aot_eager")
        for step in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                lstm(compiled(images(rank, step)).float()[None])[0].square().mean().backward()
            optimizer.step()
            scheduler.step()
        results.append([p.detach().clone() for p in model.parameters()])
        assert is_flat(averager) == flattened
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.ranks(2, backends=("gloo",))
def test_a_short_default_dtype_does_not_shorten_the_header(rank):
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.bias.fill_(rank)
    flatten_parameters(model)
    torch.set_default_dtype(torch.bfloat16)
    try:
        averager = PeriodicModelAverager(2, timeout=20)
        averager.step = 1000
        averager.average_parameters(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (model.bias == 0.5).all()


def test_parameters_that_share_memory_without_being_one_are_refused():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = torch.nn.Parameter(model[0].weight.data)
    with pytest.raises(ValueError, match="'1.weight' shares memory with '0.weight'"):
        flatten_parameters(model)
    with pytest.raises(ValueError, match="'group0.2' shares memory with 'group0.0'"):
        flatten_parameters(torch.optim.SGD(model.parameters()))
    model[1].weight = model[0].weight
    flatten_parameters(model)
    assert model[1].weight is model[0].weight


def test_memory_that_is_shared_in_part_is_refused():
    model = torch.nn.Linear(3, 3)
    model.last = torch.nn.Parameter(model.weight.data[2:])
    with pytest.raises(ValueError, match="'last' shares memory with 'weight'"):
        flatten_parameters(model)
    del model.last
    model.register_buffer("first", model.weight.data[0])
    with pytest.raises(ValueError, match="shares memory"):
        flatten_parameters(model)
    del model.first
    columns = torch.zeros(4, 4)
    model.left, model.right = (torch.nn.Parameter(half) for half in columns.split(2, dim=1))
    model.register_buffer("one", torch.zeros(6)), model.register_buffer("same", model.one[:3])
    with pytest.warns(UserWarning, match="gaps in its memory"):
        flatten_parameters(model)  # what is moved shares nothing
    assert model.left.data_ptr() == columns.data_ptr() and model.same.data_ptr() == model.one.data_ptr()
