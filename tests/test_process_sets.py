"""Who averages: process sets, found and made, and averaging in a hierarchy of them (CASES.md, Process sets)."""

from __future__ import annotations

import functools
import textwrap

import horovod.torch as hvd
import numpy as np
import pytest
import reference
import torch

from hvd_averaging import (
    AveragingError,
    HierarchicalModelAverager,
    HorovodNotInitializedError,
    PeriodicModelAverager,
    ProcessSetError,
    average_parameters,
    broadcast_parameters,
    check_replicas,
    process_sets,
)

dynamic = functools.partial(pytest.mark.ranks, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})


def hierarchical(start, steps, levels, local, warmup_steps=0):
    """NumPy: at a step that several periods divide, the groups of the largest one average."""
    replicas, history = start, []
    for step in range(steps):
        replicas = local(step, replicas)
        periods = [period for period in levels if step % period == 0]
        if step >= warmup_steps and periods:
            size = levels[max(periods)]
            for first in range(0, len(replicas), size):
                replicas = reference.average(replicas, range(first, first + size))
        history.append(replicas)
    return history


@pytest.mark.parametrize(
    ("size", "sizes", "expected"),
    [
        (8, [2, 4, 8], [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1, 2, 3], [4, 5, 6, 7]]),
        (6, [3], [[0, 1, 2], [3, 4, 5]]),
        (4, [1, 4], []),
    ],
)
def test_plan_lists_what_init_needs(size, sizes, expected):
    assert process_sets.plan(size, sizes) == expected


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="5 ranks cannot be cut into groups of 2: rank 4 would be left over"):
        process_sets.plan(5, [2])
    with pytest.raises(HorovodNotInitializedError, match="hvd.init"):
        process_sets.by_size(2)


@dynamic(4)
def test_groups_are_made_once_and_found_again(rank, size):
    pair = process_sets.by_size(2)
    assert pair.ranks == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert process_sets.by_size(2).process_set_id == pair.process_set_id
    assert process_sets.of(pair.ranks if rank < 2 else [0, 1]).ranks == [0, 1]
    assert process_sets.by_size(4) is hvd.global_process_set
    assert process_sets.of(range(4)) is hvd.global_process_set
    alone = process_sets.by_size(1)
    assert (alone.ranks, alone.process_set_id) == ([rank], None)
    assert [level.ranks for level in process_sets.hierarchy([1, 2, 4])] == [[rank], pair.ranks, list(range(4))]
    assert process_sets.by_size(2, within=process_sets.of([0, 3])).ranks == [0, 3]


@dynamic(4)
def test_wrong_groups_are_refused_on_all_ranks(rank):
    for wrong, says in [
        (lambda: process_sets.by_size(3), "rank 3 would be left over"),
        (lambda: process_sets.by_size(0), "at least one rank"),
        (lambda: process_sets.hierarchy([2, 3]), "whole groups"),
        (lambda: process_sets.hierarchy([4, 2]), "whole groups"),
        (lambda: process_sets.of([]), "different ranks from 0 to 3"),
        (lambda: process_sets.of([1, 1]), "different ranks"),
        (lambda: process_sets.of([2, 4]), "different ranks"),
    ]:
        with pytest.raises(ValueError, match=says):
            wrong()


@dynamic(4)
def test_by_node_on_one_host(rank):
    assert process_sets.by_node() is hvd.global_process_set
    assert process_sets.across_nodes().ranks == [rank]


@dynamic(4)
def test_hosts_are_told_apart_by_name(rank, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: f"host{rank % 2}")
    assert process_sets.by_node().ranks == [rank % 2, rank % 2 + 2]
    assert process_sets.across_nodes().ranks == [rank // 2 * 2, rank // 2 * 2 + 1]
    monkeypatch.setattr("socket.gethostname", lambda: "large" if rank else "small")
    assert process_sets.by_node().ranks == ([1, 2, 3] if rank else [0])
    with pytest.raises(ValueError, match="1 on the host of rank 0; 3 on the host of ranks 1, 2 and 3"):
        process_sets.across_nodes()


@pytest.mark.ranks(3, backends=("gloo",))
@pytest.mark.parametrize("value", [None, "0", "true"])  # Horovod reads a number: "true" is 0
def test_without_dynamic_sets_the_message_says_both_ways(rank, monkeypatch, value):
    if value is not None:
        monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", value)
    both = r'process_sets=\[.*plan\(.*process_sets="dynamic".*DYNAMIC_PROCESS_SETS=1'
    with pytest.raises(ProcessSetError, match=both):
        process_sets.of([0, 1])


def test_sets_listed_at_the_start_are_enough(horovodrun):
    script = """
        import os, torch, horovod.torch as hvd
        from hvd_averaging import HierarchicalModelAverager, process_sets
        hvd.init(process_sets=[hvd.ProcessSet(ranks) for ranks in process_sets.plan(4, [2, 4])])
        weights = torch.tensor([float(hvd.rank())])
        averager = HierarchicalModelAverager({2: 2, 4: 4}, warmup_steps=1)
        for step in range(5):
            averager.average_parameters([weights])
            if step == 2:
                assert weights.item() == [0.5, 0.5, 2.5, 2.5][hvd.rank()], weights
        print("mean", weights.item(), flush=True)
    """
    done = horovodrun(4, textwrap.dedent(script), "mpi")
    assert done.output.count("mean 1.5") == 4, done.output


@dynamic(4)
@pytest.mark.parametrize("levels", [{2: 2, 4: 4}, {4: 4, 2: 2}])
def test_pairs_agree_then_all_in_any_order_of_the_dict(rank, levels):
    weights = torch.tensor([float(rank)], dtype=torch.float64)
    averager = HierarchicalModelAverager(levels)
    history = []
    for _ in range(5):
        weights += 1
        done = averager.average_parameters([weights])
        history.append((weights.item(), done and done.ranks))
    # Step 0: all, (0 + 1 + 2 + 3) / 4 + 1. Equal drift keeps them equal from then on, whoever averages.
    assert history == [(2.5, 4), (3.5, None), (4.5, 2), (5.5, None), (6.5, 4)]
    weights += rank
    averager.average_parameters([weights])
    averager.average_parameters([weights])
    assert weights.item() == 6.5 + [0.5, 0.5, 2.5, 2.5][rank], "pairs agree and differ from each other at step 6"


@dynamic(4)
@pytest.mark.parametrize(("levels", "warmup"), [({2: 2, 4: 4}, 0), ({1: 2, 3: 4}, 0), ({2: 1, 3: 2, 5: 4}, 4)])
def test_every_step_follows_the_reference(rank, size, levels, warmup):
    start = np.arange(size * 2, dtype=float).reshape(size, 2)
    drift = np.arange(1, size + 1)[:, None]
    expected = hierarchical(start, 12, levels, lambda step, w: w + (step + 1) * drift, warmup)
    weights = torch.tensor(start[rank])
    averager = HierarchicalModelAverager(levels, warmup_steps=warmup)
    for step in range(12):
        weights += (step + 1) * (rank + 1)
        averager.average_parameters([weights])
        np.testing.assert_allclose(weights.numpy(), expected[step][rank], rtol=1e-14)


@pytest.mark.ranks(8, backends=("gloo",), limit=90, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_three_levels_on_eight_ranks(rank, size):
    levels = {1: 2, 2: 4, 4: 8}
    start = np.arange(size, dtype=float)[:, None]
    expected = hierarchical(start, 9, levels, lambda step, w: w + np.arange(size)[:, None], 1)
    weights = torch.tensor(start[rank])
    averager = HierarchicalModelAverager(levels, warmup_steps=1)
    for step in range(9):
        weights += rank
        done = averager.average_parameters([weights])
        assert (done and done.ranks) == (None if step == 0 else 8 if step % 4 == 0 else 4 if step % 2 == 0 else 2)
        np.testing.assert_allclose(weights.numpy(), expected[step][rank], rtol=1e-14)


@dynamic(4)
def test_one_level_equals_the_periodic_averager_bit_for_bit(rank, size):
    torch.manual_seed(rank)
    one, other = torch.randn(50), torch.zeros(50)
    other.copy_(one)
    flat, level = PeriodicModelAverager(3), HierarchicalModelAverager({3: size})
    for step in range(7):
        for weights, averager in ((one, flat), (other, level)):
            weights += step
            averager.average_parameters([weights])
        assert torch.equal(one, other)


@dynamic(4)
def test_two_hierarchies_with_the_same_levels(rank):
    weights = [torch.tensor([float(rank)]), torch.tensor([10.0 * rank])]
    averagers = [HierarchicalModelAverager({2: 2, 4: 4}, warmup_steps=1) for _ in weights]
    for _ in range(3):
        for weight, averager in zip(weights, averagers, strict=True):
            averager.average_parameters([weight])
    assert [weight.item() for weight in weights] == [[0.5, 0.5, 2.5, 2.5][rank], [5, 5, 25, 25][rank]]


@dynamic(3, backends=("gloo",))
def test_groups_of_two_on_three_ranks_are_an_error_at_construction(rank):
    with pytest.raises(ValueError, match="whole groups"):
        HierarchicalModelAverager({2: 2, 4: 3})


@dynamic(4)
@pytest.mark.parametrize(
    ("levels", "says"),
    [
        ({}, "empty"),
        ({0: 2, 4: 4}, "at least 1 step"),
        ({2: 4, 4: 2}, "larger groups"),
        ({2: 4, 4: 4}, "larger groups"),
        ({2: 2}, "all 4 ranks"),
        ({2: 2, 4: 8}, "all 4 ranks"),
    ],
)
def test_wrong_levels_are_refused(rank, levels, says):
    with pytest.raises(ValueError, match=says):
        HierarchicalModelAverager(levels)


@dynamic(4)
def test_several_steps_at_once_run_the_largest_round_among_them(rank):
    averager, weights = HierarchicalModelAverager({1: 2, 4: 4}, warmup_steps=1), torch.tensor([float(rank)])
    averager.average_parameters([weights], steps=2)
    assert weights.item() == [0.5, 0.5, 2.5, 2.5][rank]
    done = averager.average_parameters([weights], steps=5)
    assert (done.step, done.ranks, averager.step) == (4, 4, 7)
    with pytest.raises(AveragingError, match="PeriodicModelAverager"):
        averager.join([weights])
    with averager:
        averager.average_parameters([weights])


@pytest.mark.ranks(2)
def test_a_set_of_one_rank_never_communicates(rank):
    alone = hvd.ProcessSet([rank])
    weights = torch.tensor([float(rank)])
    averager = PeriodicModelAverager(period=2, process_set=alone, timeout=5)
    for _ in range(3 if rank else 6):
        averager.average_parameters([weights])
    assert averager.join([weights]).ranks == (0 if rank else 1)
    assert average_parameters([weights], alone).ranks == 1
    assert check_replicas([weights], alone)
    broadcast_parameters([weights], root_rank=rank, process_set=alone)
    with pytest.raises(TypeError, match="not a tensor"):
        average_parameters(["weights"], alone)
    assert weights.item() == rank


def test_a_set_is_gone_after_horovod_was_restarted(horovodrun, tmp_path):
    script = """
        import pathlib, sys, time
        import torch, horovod.torch as hvd
        from hvd_averaging import *
        pair = hvd.ProcessSet([0, 1])
        hvd.init(process_sets=[pair])
        weights = torch.tensor([float(hvd.rank())])
        averagers = PeriodicModelAverager(2, process_set=pair), PeriodicModelAverager(2)
        for averager in averagers:
            if hvd.rank() < 2 or averager.process_set is None:
                averager.average_parameters([weights], steps=2)
        rank = hvd.rank()
        hvd.shutdown()
        # A rank that is back too early finds the old addresses of those that have not left yet (Gloo), and stalls.
        (pathlib.Path(sys.argv[1]) / str(rank)).touch()
        while len(list(pathlib.Path(sys.argv[1]).iterdir())) < 3:
            time.sleep(0.01)
        hvd.init()
        try:
            averagers[0].average_parameters([weights])
        except ProcessSetError as error:
            print("told:", error, flush=True)
        print("averaged", averagers[1].average_parameters([weights]).ranks, flush=True)
    """
    left = tmp_path / "left"
    left.mkdir()
    done = horovodrun(3, textwrap.dedent(script), args=[str(left)])
    said = " ".join(done.output.split())
    assert said.count("it went away with hvd.shutdown()") == 3, done.output
    assert said.count("averaged 3") == 3
