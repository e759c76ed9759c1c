"""What takes part in a round, and ranks that do not bring the same (CASES.md, Which tensors)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_averaging import (
    AveragingError,
    LayoutMismatchError,
    PeerError,
    PeriodicModelAverager,
    average_parameters,
    averaged,
)


def parameter(value, shape=(2,), **options):
    return torch.nn.Parameter(torch.full(shape, value), **options)


def model_of(rank):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    for p in model.parameters():
        torch.nn.init.constant_(p, float(rank))
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "form",
    [
        lambda model: model,
        lambda model: model.parameters(),
        lambda model: model.named_parameters(),
        lambda model: list(model.parameters()),
        lambda model: tuple(model.named_parameters()),
        lambda model: dict(model.named_parameters()),
        lambda model: model.state_dict(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1).param_groups,
        lambda model: torch.optim.SGD(model.named_parameters(), lr=0.1).param_groups[0],
    ],
    ids=["model", "parameters", "named", "list", "pairs", "dict", "state_dict", "optimizer", "groups", "group"],
)
def test_every_way_to_pass_parameters(rank, form):
    model = model_of(rank)
    done = average_parameters(form(model))
    assert (done.tensors, done.ranks, done.bytes) == (4, 2, 4 * 13)
    assert all((p == 0.5).all() for p in model.parameters())


@pytest.mark.ranks(2, 3)
def test_a_gradient_that_only_one_rank_has_decides_nothing(rank, size):
    branches = [parameter(float(rank)), parameter(10.0 * rank)]
    branches[min(rank, 1)].sum().backward()
    assert branches[rank == 0].grad is None
    average_parameters(branches)
    assert [p.tolist() for p in branches] == [[(size - 1) / 2] * 2, [10 * (size - 1) / 2] * 2]


@pytest.mark.ranks(2, 4)
def test_equal_shapes_in_another_order_are_never_mixed(rank, size):
    pairs = [("a", parameter(float(rank))), ("b", parameter(10.0 + rank))]
    with pytest.raises(LayoutMismatchError, match=r"rank.* 0.*: 'a' of shape \[2\], float32; rank.*1.*: 'b' of shape"):
        average_parameters(pairs if rank == 0 else pairs[::-1])
    assert [p.tolist() for _, p in pairs] == [[rank] * 2, [10.0 + rank] * 2]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("other", [{"shape": (5,)}, {"shape": (1, 2)}, {"dtype": torch.float64}])
def test_another_shape_or_dtype_is_an_error_on_both(rank, position, other):
    tensors = [torch.full((2,), float(rank)) for _ in range(3)]
    if rank == 1:
        tensors[position] = torch.full(other.get("shape", (2,)), 1.0, dtype=other.get("dtype"))
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(LayoutMismatchError, match=f"parameter number {position}: rank 0: '{position}' .*; rank 1: "):
        average_parameters(tensors)
    assert all(torch.equal(tensor, kept) for tensor, kept in zip(tensors, before, strict=True))


@pytest.mark.ranks(2)
def test_a_fresh_generator_each_time_gives_full_rounds(rank):
    model, averager = model_of(rank), PeriodicModelAverager(period=2)
    for expected in (0.5, 1.0):
        done = averager.average_parameters(model.parameters())
        assert done.tensors == 4
        assert all((p == expected).all() for p in model.parameters())
        averager.average_parameters(model.parameters())
        with torch.no_grad():
            for p in model.parameters():
                p.add_(float(rank))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_spent_iterator_is_an_error_on_every_rank(rank, everywhere):
    model, averager = model_of(rank), PeriodicModelAverager(period=1, timeout=10)
    parameters = model.parameters()
    averager.average_parameters(parameters)
    params = parameters if everywhere or rank == 1 else model.parameters()
    with pytest.raises((ValueError, PeerError), match="nothing in it" if params is parameters else "rank 1 could not"):
        averager.average_parameters(params)
    assert averager.step == 1
    assert averager.average_parameters(model.parameters()).tensors == 4, "the next call is as if nothing had been"


@pytest.mark.ranks(2, backends=("gloo",))
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("call", ["average_now", "averaged", "join", "delayed", "averaged without averager"])
def test_a_spent_iterator_is_an_error_where_it_serves_several_rounds(rank, everywhere, call):
    model = model_of(rank)
    averager = PeriodicModelAverager(2, delay=1 if call == "delayed" else 0, timeout=10)
    params = model.parameters()
    if everywhere or rank == 1:
        list(params)
    with pytest.raises((ValueError, PeerError), match="nothing in it" if everywhere or rank == 1 else "rank 1 could"):
        match call:
            case "averaged":
                with averager.averaged(params):
                    pass
            case "averaged without averager":
                with averaged(params, timeout=10):
                    pass
            case "delayed":
                averager.average_parameters(params)
            case _:
                getattr(averager, call)(params)
    assert all((p == rank).all() for p in model.parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("late", [False, True])
def test_a_bad_argument_on_one_rank_is_an_error_on_every_rank(rank, late):
    weights, averager = parameter(float(rank)), PeriodicModelAverager(period=1, timeout=10)
    if late:
        averager.average_parameters([weights])
    before = weights.tolist()
    with pytest.raises((TypeError, PeerError), match="not a tensor" if rank == 1 else "rank 1 could not take part"):
        averager.average_parameters(["weights"] if rank == 1 else [weights])
    assert weights.tolist() == before


@pytest.mark.ranks(2)
def test_nothing_everywhere_is_no_op(rank):
    averager = PeriodicModelAverager(period=1)
    for _ in range(2):
        done = averager.average_parameters([])
        assert (done.tensors, done.bytes) == (0, 0)
    assert average_parameters({}).tensors == 0


@pytest.mark.ranks(2)
def test_nothing_on_one_rank_is_an_error_on_both(rank):
    weights = parameter(float(rank))
    with pytest.raises(LayoutMismatchError, match=r"rank 0: '0' of shape \[2\].*rank 1: none"):
        average_parameters([weights] if rank == 0 else [])
    assert weights.tolist() == [rank, rank]


@pytest.mark.ranks(2)
def test_scalars_and_empty_tensors_keep_their_shapes(rank):
    tensors = [torch.tensor(float(rank)), torch.empty(0), torch.empty(3, 0, 2), torch.full((1, 1), 2.0 * rank)]
    average_parameters(tensors)
    assert [tuple(tensor.shape) for tensor in tensors] == [(), (0,), (3, 0, 2), (1, 1)]
    assert (tensors[0].item(), tensors[3].item()) == (0.5, 1.0)
    assert average_parameters([torch.empty(0), torch.empty(0, 4)]).tensors == 2


@pytest.mark.ranks(2)
def test_frozen_and_integer_parameters_are_left_alone(rank):
    trained = parameter(float(rank))
    frozen = parameter(float(rank), requires_grad=False)
    integer = torch.nn.Parameter(torch.tensor([rank]), requires_grad=False)
    groups = [{"params": [frozen, integer, trained]}]
    assert average_parameters(groups).tensors == 1
    assert (trained[0].item(), frozen[0].item(), integer.item()) == (0.5, rank, rank)
    with pytest.warns(UserWarning, match="nothing to average"):
        assert average_parameters([frozen, integer]).tensors == 0


@pytest.mark.ranks(2)
def test_tied_weights_are_averaged_once_and_stay_tied(rank):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(4, 3)
            self.head = torch.nn.Linear(3, 4, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied()
    torch.nn.init.constant_(model.head.weight, float(rank))
    shared = torch.full((2,), float(rank))
    assert average_parameters(model).tensors == 1
    assert average_parameters([model.head.weight, model.embedding.weight]).tensors == 1
    assert average_parameters([torch.nn.Parameter(shared), torch.nn.Parameter(shared)]).tensors == 1
    assert model.head.weight is model.embedding.weight
    assert (model.embedding.weight == 0.5).all()
    assert (shared == 0.5).all()


@pytest.mark.ranks(2)
def test_a_layout_that_changes_on_every_rank_is_agreed_again(rank):
    first, second = parameter(float(rank)), parameter(10.0 * rank)
    groups = [{"params": [first]}]
    averager = PeriodicModelAverager(period=1)
    averager.average_parameters(groups)
    groups.append({"params": [second]})
    assert averager.average_parameters(groups).tensors == 2
    assert second.tolist() == [5.0, 5.0]


@pytest.mark.ranks(2, 3)
def test_a_layout_that_drifts_on_one_rank_is_noticed_in_the_round(rank, size):
    first, second = parameter(float(rank)), parameter(10.0 * rank)
    groups = [{"params": [first]}]
    averager = PeriodicModelAverager(period=1, timeout=10)
    averager.average_parameters(groups)
    if rank == 1:
        groups.append({"params": [second]})
    before = first.tolist()
    with pytest.raises(LayoutMismatchError, match="rank.* 0.*: none .*; rank 1: 'group1.0'"):
        averager.average_parameters(groups)
    assert first.tolist() == before
    assert second.tolist() == [10.0 * rank] * 2
    assert averager.average_parameters(groups[:1]).tensors == 1, "ranks that agree again go on"


@pytest.mark.ranks(2)
def test_averagers_that_are_set_up_differently_are_an_error(rank):
    weights = parameter(float(rank))
    averager = PeriodicModelAverager(period=2 + rank, warmup_steps=4, timeout=10)
    with pytest.raises(LayoutMismatchError, match=r"rank 0: .*period=2.*; rank 1: .*period=3"):
        for _ in range(5):
            averager.average_parameters([weights])
    assert weights.tolist() == [rank, rank]


@pytest.mark.ranks(2)
def test_one_error_class_catches_them_all(rank):
    with pytest.raises(AveragingError):
        average_parameters([torch.ones(2 + rank)])


@pytest.mark.ranks(2, backends=("gloo",))
def test_a_tensor_of_numpy_without_elements(rank):
    weights = [torch.nn.Parameter(torch.from_numpy(np.zeros((0, 4), "f"))), parameter(float(rank))]
    average_parameters(weights)
    assert (weights[1] == 0.5).all()


@pytest.mark.ranks(2, backends=("gloo",))
@pytest.mark.parametrize("who", [{1}, {0, 1}])
def test_a_column_that_becomes_a_row_is_another_shape(rank, who):
    weights = [parameter(float(rank), (6, 1))]
    averager = PeriodicModelAverager(period=1, timeout=20)
    averager.average_parameters(weights)
    if rank in who:
        weights[0].data = weights[0].data.t()
    if who == {0, 1}:
        weights[0].data.fill_(rank)
        averager.average_parameters(weights)
        assert (weights[0] == 0.5).all() and weights[0].shape == (1, 6)
    else:
        with pytest.raises(LayoutMismatchError, match="shape"):
            averager.average_parameters(weights)
