"""What the mean of a tensor is: precision, strides, in place (CASES.md, What the mean means)."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch

from hvd_averaging import PeriodicModelAverager, average_parameters

SMALL_AND_LARGE = 1000, 10_000  # elements of a tensor: large ones are divided each by itself


@pytest.mark.ranks(2)
@pytest.mark.parametrize("position", [0, 1])
def test_bf16_wherever_it_stands(rank, position):
    tensors = [torch.full((3,), 1.0 + rank) for _ in range(2)]
    tensors[position] = tensors[position].bfloat16()
    average_parameters(tensors)
    assert tensors[position].dtype == torch.bfloat16
    assert all((tensor == 1.5).all() for tensor in tensors)


@pytest.mark.ranks(2, 4)
def test_fp16_does_not_overflow(rank):
    tensor = torch.full((4,), 60000.0, dtype=torch.float16)
    average_parameters([tensor])
    assert (tensor == 60000).all()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", SMALL_AND_LARGE)
def test_means_are_those_of_numpy_rounded_once(rank, size, dtype, count):
    everyone = torch.randn(size, count, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
    expected = reference.average(everyone.double().numpy())[rank]
    tensor = everyone[rank].clone()
    average_parameters([tensor])
    assert tensor.dtype == dtype
    # The sum of n numbers of size one, its division and its rounding: a few units in the last place.
    precision = torch.finfo(torch.float32 if dtype.itemsize <= 4 else dtype).eps
    absolute = 4 * precision + torch.finfo(dtype).eps
    np.testing.assert_allclose(tensor.double().numpy(), expected, rtol=torch.finfo(dtype).eps, atol=absolute)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("count", SMALL_AND_LARGE)
def test_complex_is_averaged_as_pairs_of_reals(rank, size, dtype, count):
    tensor = torch.full((2, count), complex(rank, -2 * rank), dtype=dtype)
    average_parameters([torch.ones(2), tensor])
    assert tensor.dtype == dtype
    mean = (size - 1) / 2
    torch.testing.assert_close(tensor, torch.full((2, count), complex(mean, -2 * mean), dtype=dtype))


@pytest.mark.ranks(2, 4)
def test_identical_replicas_stay_bit_for_bit(rank):
    generator = torch.Generator().manual_seed(7)
    tensors = [torch.randn(100, 7, generator=generator) * 10.0**power for power in (-30, -5, 0, 5, 30)]
    tensors += [torch.randn(50, generator=generator).to(dtype) for dtype in (torch.float16, torch.bfloat16)]
    tensors += [torch.tensor([0.1, 70000.0, -0.0])]
    before = [tensor.clone() for tensor in tensors]
    average_parameters(tensors)
    assert all(torch.equal(tensor, kept) for tensor, kept in zip(tensors, before, strict=True))


@pytest.mark.ranks(3)
def test_identical_replicas_stay_within_one_ulp_where_the_size_is_no_power_of_two(rank):
    tensor = torch.randn(100_000, generator=torch.Generator().manual_seed(7))
    before = tensor.clone()
    average_parameters([tensor])
    neighbours = torch.nextafter(before, torch.tensor(-torch.inf)), torch.nextafter(before, torch.tensor(torch.inf))
    assert ((tensor >= neighbours[0]) & (tensor <= neighbours[1])).all()


def contiguous():
    return torch.zeros(2, 3, 4, 4)


def transposed():
    return torch.zeros(4, 4, 3, 2).permute(3, 2, 0, 1)


def channels_last():
    return torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)


def strided_slice():
    return torch.full((4, 6, 4, 4), -1.0)[::2, 1::2]


STRIDES = [contiguous, transposed, channels_last, strided_slice]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket_bytes", [None, 64])
@pytest.mark.parametrize("first", STRIDES)
@pytest.mark.parametrize("second", STRIDES)
@pytest.mark.filterwarnings("ignore:With period=1")
def test_logical_elements_are_averaged_whatever_the_strides(rank, first, second, bucket_bytes):
    everyone = torch.randn(2, 2, 2, 3, 4, 4, generator=torch.Generator().manual_seed(3))
    tensors = [first(), second()]
    for tensor, value in zip(tensors, everyone[rank], strict=True):
        tensor.copy_(value)
    strides = [tensor.stride() for tensor in tensors]
    PeriodicModelAverager(1, bucket_bytes=bucket_bytes).average_parameters(tensors)
    assert [tensor.stride() for tensor in tensors] == strides
    for tensor, expected in zip(tensors, everyone.mean(dim=0), strict=True):
        torch.testing.assert_close(tensor, expected)
        base = tensor._base
        if base is not None and base.shape[:2] == (4, 6):
            assert (base[1::2] == -1).all(), "neighbours of the slice"
            assert (base[:, ::2] == -1).all(), "neighbours of the slice"


@pytest.mark.ranks(2)
def test_large_tensors_of_other_strides(rank):
    large = [torch.zeros(100, 90).t(), torch.zeros(8, 8, 16, 16).contiguous(memory_format=torch.channels_last)]
    large += [torch.zeros(300, 200)[::2, 1::2]]
    everyone = [torch.randn(2, *tensor.shape, generator=torch.Generator().manual_seed(3)) for tensor in large]
    for tensor, values in zip(large, everyone, strict=True):
        tensor.copy_(values[rank])
    average_parameters(large)
    for tensor, values in zip(large, everyone, strict=True):
        torch.testing.assert_close(tensor, values.mean(dim=0))


@pytest.mark.ranks(2)
def test_another_rank_may_have_other_strides(rank):
    tensor = torch.empty(3, 4) if rank == 0 else torch.empty(4, 3).t()
    tensor.copy_(torch.arange(12.0).view(3, 4) * (rank + 1))
    average_parameters([tensor])
    torch.testing.assert_close(tensor, torch.arange(12.0).view(3, 4) * 1.5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket_bytes", [1, 40, 1000, 10**9])
@pytest.mark.filterwarnings("ignore:With period=1")
def test_any_bucket_size_gives_the_same(rank, bucket_bytes):
    def tensors():
        generator = torch.Generator().manual_seed(rank)
        shapes = ((7, 5), (3,), (), (2, 0), (50,))
        made = [torch.randn(shape, generator=generator) for shape in shapes]
        return [*made, torch.randn(9, dtype=torch.complex64, generator=generator), made[0].double()]

    whole, cut = tensors(), tensors()
    average_parameters(whole)
    PeriodicModelAverager(1, bucket_bytes=bucket_bytes).average_parameters(cut)
    assert all(torch.equal(one, other) for one, other in zip(whole, cut, strict=True))


@pytest.mark.ranks(2)
def test_written_in_place(rank):
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, float(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    view, pointer, version = model.weight.detach()[0], model.weight.data_ptr(), model.weight._version
    average_parameters(optimizer)
    assert model.weight.data_ptr() == pointer
    assert view.tolist() == [0.5] * 3
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert model.weight._version > version
    assert model.weight.requires_grad
    assert model.weight.is_leaf
    assert model.weight.grad is None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.no_grad])
def test_a_round_records_no_gradient(rank, grad_mode):
    model = torch.nn.Linear(3, 2)
    with grad_mode():
        average_parameters(model)
    assert all(p.grad_fn is None for p in model.parameters())


@pytest.mark.ranks(2)
def test_between_forward_and_backward_autograd_complains(rank):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    loss = model(torch.ones(2, 3)).sum()
    average_parameters(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.ranks(2)
def test_other_values_are_neither_hidden_nor_spread(rank):
    tensor = torch.tensor([1.0, float("nan") if rank else 2.0, float("inf"), 3.0])
    average_parameters([tensor, torch.ones(3)])
    assert tensor[0] == 1
    assert tensor[1].isnan()
    assert tensor[2].isinf()
    assert tensor[3] == 3
