"""Equal starts, checks of equality, and ranks outside the process set."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch

from hvd_averaging import (
    LayoutMismatchError,
    PeriodicModelAverager,
    ProcessSetError,
    average_parameters,
    broadcast_parameters,
    check_replicas,
    process_sets,
)


class Mixed(torch.nn.Module):
    """Every kind of state that a broadcast must carry."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.conv = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm2d(3)
        self.norm.num_batches_tracked += rank
        self.frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)
        self.short = torch.nn.Parameter(torch.randn(5).bfloat16())
        self.register_buffer("pairs", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("mask", torch.tensor([rank == 0, rank == 1]))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("odd", torch.tensor([float("nan"), -0.0, rank], dtype=torch.float64))


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("root_rank", [0, 1])
def test_broadcast_carries_every_tensor_bit_for_bit(rank, root_rank):
    model, original = Mixed(rank), Mixed(root_rank)
    pointers = [tensor.data_ptr() for tensor in model.state_dict().values()]
    assert not check_replicas(model)
    assert broadcast_parameters(model, root_rank) is None
    assert check_replicas(model)
    for (name, tensor), expected in zip(model.state_dict().items(), original.state_dict().values(), strict=True):
        assert tensor.dtype == expected.dtype
        assert torch.equal(bits(tensor), bits(expected)), name
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == pointers
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.ranks(2)
def test_broadcast_takes_a_state_dict_and_a_generator(rank):
    for form in (lambda model: model.state_dict(), lambda model: model.parameters()):
        model = Mixed(rank)
        broadcast_parameters(form(model))
        assert check_replicas(form(model))


@pytest.mark.ranks(2)
def test_broadcast_refuses_a_root_outside_the_job_on_every_rank(rank):
    tensor = torch.full((2,), float(rank))
    with pytest.raises(ValueError, match="root_rank 2 is not one of its ranks"):
        broadcast_parameters([tensor], root_rank=2)
    with pytest.raises(LayoutMismatchError, match=r"rank 0: .*root_rank=0.*; rank 1: .*root_rank=1"):
        broadcast_parameters([tensor], root_rank=rank)
    assert tensor.tolist() == [rank, rank]


@pytest.mark.ranks(2, 4)
def test_check_names_the_tensors_and_ranks_that_differ(rank, size):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    broadcast_parameters(model)
    report = check_replicas(model)
    assert report
    assert report.equal
    assert str(report) == "all replicas are bitwise equal"
    with torch.no_grad():
        if rank == size - 1:
            model[1].weight[0, 0] = torch.nextafter(model[1].weight[0, 0], torch.tensor(9.0))
        if rank >= 1:
            model[1].bias += 1.0
    report = check_replicas(model)
    assert not report
    assert report.differences == (("1.weight", (size - 1,)), ("1.bias", tuple(range(1, size))))
    assert f"'1.weight' on rank {size - 1}" in str(report)


@pytest.mark.ranks(2)
def test_check_sees_bits_not_values(rank):
    assert not check_replicas([torch.tensor([0.0 if rank else -0.0])])
    assert check_replicas([torch.tensor([float("nan")])])
    assert check_replicas([torch.empty(0), torch.tensor([True]), torch.tensor(3)])


@pytest.mark.ranks(2)
def test_after_a_round_all_replicas_are_equal(rank):
    torch.manual_seed(rank)
    model = torch.nn.Linear(50, 50).to(torch.bfloat16)
    average_parameters(model)
    assert check_replicas(model.parameters())


@pytest.mark.ranks(2)
def test_check_refuses_models_that_are_not_alike(rank):
    with pytest.raises(LayoutMismatchError, match=r"'weight' of shape \[2, 2\].*'weight' of shape \[3, 2\]"):
        check_replicas(torch.nn.Linear(2, 2 + rank))


@pytest.mark.ranks(4, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_ranks_outside_the_set_only_count(rank):
    even = process_sets.of([0, 2])
    weights = torch.tensor([[1.0, 100.0, 3.0, 100.0][rank]])
    averager = PeriodicModelAverager(period=2, process_set=even)
    rounds = [averager.average_parameters([weights]) for _ in range(4)]
    assert weights.item() == [2, 100, 2, 100][rank]
    assert averager.step == 4
    assert [done.step for done in rounds if done] == ([0, 2] if rank in (0, 2) else [])
    assert average_parameters([weights], even) is None or rank in (0, 2)
    assert (check_replicas([weights], even) is None) == (rank in (1, 3))
    broadcast_parameters([weights], root_rank=2, process_set=even)
    with averager:
        averager.average_parameters([weights])
    assert averager.join([weights]) is None or rank in (0, 2)


@pytest.mark.ranks(4, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_two_sets_average_side_by_side(rank):
    pairs = process_sets.of([0, 1]), process_sets.of([2, 3])
    weights = torch.tensor([float(rank)])
    PeriodicModelAverager(period=2, process_group=pairs[rank // 2]).average_parameters([weights])
    assert weights.item() == [0.5, 0.5, 2.5, 2.5][rank]


@pytest.mark.ranks(2)
def test_a_set_that_was_never_registered_is_refused(rank):
    averager = PeriodicModelAverager(period=2, process_set=hvd.ProcessSet([0, 1]))
    with pytest.raises(ProcessSetError, match="not registered.*add_process_set"):
        averager.average_parameters([torch.ones(1)])
