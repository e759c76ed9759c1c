"""Many buckets, reduced one after another in the memory of two."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import horovod.torch as hvd
import pytest
import torch

from hvd_averaging import PeriodicModelAverager, StepMismatchError, check_replicas
from hvd_averaging.adapters.torch_flat import FlatReduction
from hvd_averaging.adapters.torch_pipeline import PipelinedReduction
from hvd_averaging.adapters.torch_reduction import TorchReduction
from hvd_averaging.torch import flatten_parameters

MB = 2**20

on_gloo = functools.partial(pytest.mark.ranks, backends=("gloo",))
pytestmark = pytest.mark.filterwarnings("ignore:With period=1")


def high_water() -> int:
    """Bytes of memory that this process had at most since `lower_the_mark`."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def lower_the_mark() -> None:
    Path("/proc/self/clear_refs").write_text("5")


@on_gloo(2)  # Open MPI has buffers of its own, which come and go
def test_a_round_takes_the_memory_of_two_buckets(rank):
    weights = [torch.full((MB,), float(rank)) for _ in range(16)]  # 64 MB

    def extra_memory(bucket_bytes):
        # These are for the buffers of Horovod's own, which it keeps: in one it puts two buckets together, now and then.
        hvd.grouped_allreduce_([torch.zeros(2 * MB), torch.zeros(2 * MB)], name="two buckets")
        PeriodicModelAverager(1, bucket_bytes=bucket_bytes, name=f"first, {bucket_bytes}").average_parameters(weights)
        averager = PeriodicModelAverager(1, bucket_bytes=bucket_bytes, name=f"second, {bucket_bytes}")
        lower_the_mark()
        before = high_water()
        averager.average_parameters(weights)
        return high_water() - before

    assert extra_memory(8 * MB) < 2 * 8 * MB + 10 * MB
    assert extra_memory(2**40) > 60 * MB, "in one bucket it takes as much as the model, or this test sees nothing"


@on_gloo(2, 3)
def test_every_round_gives_the_mean(rank, size):
    weights = [torch.zeros(100, 7), torch.zeros(50, dtype=torch.float64), torch.zeros(33).bfloat16(), torch.zeros(0)]
    averager = PeriodicModelAverager(1, bucket_bytes=400)
    for step in range(3):
        for weight in weights:
            weight.fill_(float(rank + step))
        done = averager.average_parameters(weights)
        assert isinstance(averager._rounds._agreed.reduction, PipelinedReduction)
        assert done.bytes == 4 * 700 + 8 * 50 + 4 * 33 and done.ranks == size
        assert all((weight == step + (size - 1) / 2).all() for weight in weights)


@on_gloo(2)
@pytest.mark.parametrize(
    ("sizes", "flat", "options", "expected"),
    [
        ([17, 1], False, {}, PipelinedReduction),
        ([16], False, {}, TorchReduction),
        ([17, 1], False, {"bucket_bytes": 2**40}, TorchReduction),
        ([17, 1], True, {}, FlatReduction),
    ],
)
def test_large_models_are_pipelined_unless_they_are_flat(rank, sizes, flat, options, expected):
    weights = [torch.nn.Parameter(torch.full((size, MB), float(rank))) for size in sizes]  # so many times 4 MB
    if flat:
        flatten_parameters(weights)
    averager = PeriodicModelAverager(1, **options)
    for _ in range(2):
        averager.average_parameters(weights)
        assert type(averager._rounds._agreed.reduction) is expected
        for weight in weights:
            assert (weight == 0.5).all()
            weight.data += rank - 0.5


@on_gloo(2)
def test_nothing_is_written_before_all_ranks_agree(rank):
    weights = torch.full((1000,), float(rank))
    averager = PeriodicModelAverager(2, bucket_bytes=400)
    averager.average_parameters([weights])
    averager.step += 1 if rank == 0 else 3  # rank 1 is two steps ahead, at another round
    weights += rank
    with pytest.raises(StepMismatchError, match=r"rank 0 at step 2, rank 1 at step 4"):
        averager.average_parameters([weights])
    assert (weights == 0.5 + rank).all()


@on_gloo(3)
def test_ranks_with_fewer_batches_and_ranks_in_hvd_join(rank, size):
    weights = torch.full((1000,), float(rank))
    averager = PeriodicModelAverager(1, bucket_bytes=400)
    for _ in range(2 + rank):
        weights += 1
        averager.average_parameters([weights])
    averager.join([weights])
    assert check_replicas([weights]) and averager.step == 4
    if rank != 1:
        weights.fill_(float(rank))
        assert averager.average_parameters([weights]).ranks == 2
        assert (weights == 1).all()
    hvd.join()
