"""Ranks with less work, ranks that fail, ranks that never come (CASES.md, Uneven work, death, stalls)."""

from __future__ import annotations

import re
import textwrap

import horovod.torch as hvd
import pytest
import torch

from hvd_averaging import PeriodicModelAverager, average_parameters


def script(body, process_sets="[]"):
    """A job that ends by what happens in it, so that it needs a launch of its own."""
    start = f"""
        import sys, time
        import horovod.torch as hvd
        import torch
        from hvd_averaging import *
        process_sets = {process_sets}
        hvd.init(process_sets=process_sets)
        rank = hvd.rank()
        weights = torch.nn.Parameter(torch.full((2,), float(rank)))
    """
    return textwrap.dedent(start) + textwrap.dedent(body)


def said(done):
    """What all ranks wrote, on one line."""
    return " ".join(done.output.split())


@pytest.mark.ranks(2, 3, 4)
def test_a_rank_in_hvd_join_does_not_shrink_the_weights(rank, size):
    tensor = torch.tensor([2.0, 4.0])
    averager = PeriodicModelAverager(period=2)
    averager.average_parameters([tensor])
    averager.average_parameters([tensor])
    if rank == size - 1:
        tensor += 1
    else:
        done = averager.average_parameters([tensor])
        assert (done.ranks, done.step) == (size - 1, 2)
        assert tensor.tolist() == [2, 4]
    hvd.join()


@pytest.mark.ranks(2, 3)
def test_the_first_round_may_come_during_hvd_join(rank, size):
    tensor = torch.tensor([2.0 + rank, 4.0])
    if rank != size - 1:
        assert average_parameters([tensor]).ranks == size - 1
        assert tensor.tolist() == [2 + (size - 2) / 2, 4]
    hvd.join()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("period", [11, 5])
def test_one_batch_more_on_one_rank(rank, period):
    weights = torch.zeros(1, dtype=torch.float64)
    averager = PeriodicModelAverager(period, timeout=10)
    rounds = []
    for _ in range(10 + rank):
        weights += 1 + rank
        rounds.append(averager.average_parameters([weights]))
    last = averager.join([weights])
    assert last is not None
    assert averager.step == 11
    if period == 11:
        # Round at step 0: (1 + 2) / 2. Then nine steps of 1 on rank 0, ten of 2 on rank 1, averaged at the end.
        assert weights.item() == 1.5 + (9 * 1 + 10 * 2) / 2
    else:
        # Rounds at 0 and 5 ahead of six steps; rank 0 has four steps more, rank 1 five and the round at step 10, which
        # rank 0 serves with what it has. Nobody has anything new after that.
        at_5 = 1.5 + (5 * 1 + 5 * 2) / 2
        assert weights.item() == at_5 + (4 * 1 + 5 * 2) / 2
        assert [done.step for done in rounds if done] == [0, 5, 10][: 2 + rank]
    resumed = averager.average_parameters([weights])
    assert (resumed and resumed.step) == (11 if period == 11 else None), "training goes on at step 11 on both"


@pytest.mark.ranks(2, 4)
def test_a_rank_that_is_done_early_does_not_hold_the_others_back(rank, size):
    weights = torch.zeros(1, dtype=torch.float64)
    averager = PeriodicModelAverager(period=2, timeout=10)
    for _ in range(3 if rank == 0 else 6):
        weights += 1
        averager.average_parameters([weights])
    averager.join([weights])
    # Rank 0 ends with the round at step 2, where all hold 3, and has nothing to add to what the others learn later.
    assert weights.item() == 6
    assert averager.step == 6


@pytest.mark.ranks(3)
def test_ranks_without_any_batch_take_over_the_mean(rank):
    weights = torch.full((1,), 9.0 if rank == 2 else 1.0)
    averager = PeriodicModelAverager(period=2, timeout=10)
    for _ in range(0 if rank == 2 else 4):
        averager.average_parameters([weights])
    averager.join([weights])
    # Rank 2 brings its 9 once, in the first round: (1 + 1 + 9) / 3. It has nothing to add later.
    torch.testing.assert_close(weights, torch.tensor([11 / 3]))


@pytest.mark.ranks(2)
def test_join_after_the_count_was_set_by_hand(rank):
    weights = torch.zeros(1)
    averager = PeriodicModelAverager(period=5)
    averager.average_parameters([weights], steps=6)
    weights += rank
    averager.step = 6  # the value it has, but who knows what happened to the weights
    averager.join([weights])
    assert weights.item() == 0.5


@pytest.mark.ranks(2)
def test_join_after_no_step_at_all(rank):
    weights = torch.full((1,), float(rank))
    averager = PeriodicModelAverager(period=2)
    averager.join(iter([weights]))
    assert (weights.item(), averager.step) == (0.5, 0)


def test_an_extra_unnamed_call_changes_no_names(horovodrun, tmp_path):
    body = """
        if rank == 0:
            extra = hvd.allreduce_async(torch.ones(3))  # unnamed: from here on the ranks number their calls differently
        averager = PeriodicModelAverager(period=2)
        for step in range(6):
            weights.data += rank
            averager.average_parameters([weights])
        if rank == 1:
            hvd.allreduce(torch.ones(3), name="noname.1")
        print("weights", weights.tolist(), flush=True)
    """
    timeline = tmp_path / "timeline.json"
    done = horovodrun(2, script(body), env={"HOROVOD_TIMELINE": str(timeline)})
    assert done.returncode == 0, done.output
    # Rank 0 stands still between rounds, rank 1 adds 1 per step and starts at 1: 1, then 1 + 2 / 2, then 2 + 2 / 2.
    assert "weights [3.0, 3.0]" in said(done)
    assert "weights [4.0, 4.0]" in said(done)
    names = re.findall(r'"name": "(grouped_allreduce[^"]*PeriodicModelAverager[^"]*)"', timeline.read_text())
    assert len(names) == 1, "one name, introduced once, for three rounds"


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_an_exception_on_one_rank_ends_the_job(horovodrun, backend):
    body = """
        averager = PeriodicModelAverager(period=2, timeout=30)
        with averager:
            for step in range(10):
                if rank == 1 and step == 3:
                    raise ValueError("the data is bad")
                averager.average_parameters([weights])
    """
    done = horovodrun(2, script(body), backend, limit=60)
    assert not done.timed_out
    assert done.returncode != 0
    assert "ValueError: the data is bad" in said(done)
    assert "StepMismatchError" not in said(done), "an exception that unwinds must not say goodbye to anyone"


@pytest.mark.parametrize(("backend", "subset"), [("mpi", False), ("gloo", True)])
def test_a_rank_that_never_averages_ends_the_job(horovodrun, backend, subset):
    body = """
        averager = PeriodicModelAverager(1, 0, *process_sets, timeout=3, name="slow")
        averager.average_parameters([weights])
        if rank == 1:
            time.sleep(600)
        averager.average_parameters([weights])
        time.sleep(600)
    """
    job = script(body, "[hvd.ProcessSet([0, 1])]" if subset else "[]")
    done = horovodrun(3 if subset else 2, job, backend, limit=60)
    assert not done.timed_out
    assert done.returncode != 0
    assert "AveragingTimeoutError" in said(done)
    assert "slow (step 1, process set {0, 1}): rank 0 has waited 3 s for rank 1" in said(done)


def test_a_rank_that_ends_early_is_an_error_that_says_so(horovodrun):
    body = """
        averager = PeriodicModelAverager(period=4, warmup_steps=3, timeout=30)
        for step in range(7 if rank == 1 else 8):
            averager.average_parameters([weights])
        print(f"rank {rank} is done", flush=True)
    """
    done = horovodrun(2, script(body), limit=60)
    assert not done.timed_out
    assert done.returncode != 0
    assert "PeriodicModelAverager (step 7, process set {0, 1})" in said(done)
    assert "rank 0 is done" not in said(done)


def test_an_averager_that_gave_up_says_so_again(horovodrun):
    body = """
        averager = PeriodicModelAverager(period=2, timeout=0.5)
        if rank == 1:
            time.sleep(3)
            sys.exit()
        for attempt in range(2):
            try:
                averager.average_parameters([weights])
            except AveragingError as error:
                print(type(error).__name__, error, weights.tolist(), averager.step, flush=True)
    """
    done = horovodrun(2, script(body))
    lines = re.findall(r"(AveragingTimeoutError|AveragingError) (.*?) \[0.0, 0.0\] 0", said(done))
    assert [kind for kind, _ in lines] == ["AveragingTimeoutError", "AveragingError"], done.output
    assert "rank 0 has waited 0.5 s for rank 1" in lines[0][1]
    assert "cannot go on after an earlier error" in lines[1][1]


def test_a_step_missed_without_a_context_still_ends_the_job(horovodrun):
    body = """
        averager = PeriodicModelAverager(period=4, timeout=5)
        for step in range(9):
            if not (rank == 1 and step == 2):
                averager.average_parameters([weights])
        time.sleep(60 if rank == 1 else 0)
    """
    done = horovodrun(2, script(body), limit=60)
    assert not done.timed_out
    assert done.returncode != 0
    assert "PeriodicModelAverager (step 8, process set {0, 1}): rank 0 has waited 5 s" in said(done)
