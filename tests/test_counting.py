"""One call is one optimizer step, whatever is passed, however often training is interrupted (CASES.md, Counting)."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch

from hvd_averaging import PeriodicModelAverager, StepMismatchError


def parameter(value, shape=(3,)):
    return torch.nn.Parameter(torch.full(shape, float(value)))


def train(averager, weights, steps, drift=1.0):
    """``steps`` optimizer steps that each add ``drift``; the steps at which there was a round."""
    rounds = []
    for _ in range(steps):
        with torch.no_grad():
            weights.add_(drift)
        done = averager.average_parameters([weights])
        if done is not None:
            rounds.append(done.step)
    return rounds


@pytest.mark.ranks(2, 4)
def test_groups_count_once(rank, size):
    first, second, third = (parameter(rank * factor) for factor in (1, 10, 100))
    groups = torch.optim.SGD([{"params": [first, second]}, {"params": [third], "lr": 0.1}], lr=1.0).param_groups
    averager = PeriodicModelAverager(period=4)
    rounds = [averager.average_parameters(groups) for _ in range(8)]
    assert [done.step for done in rounds if done] == [0, 4]
    assert all(done.tensors == 3 and done.ranks == size and done.bytes == 36 for done in rounds if done)
    assert averager.step == 8
    mean = (size - 1) / 2
    assert [p[0].item() for p in (first, second, third)] == [mean, 10 * mean, 100 * mean]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shapes", [((3,), (3,)), ((3,), (2, 2))])
def test_two_averagers_do_not_collide(rank, shapes):
    weights = [parameter(rank + 10 * number, shape) for number, shape in enumerate(shapes)]
    averagers = [PeriodicModelAverager(period=2) for _ in weights]
    rounds = [[], []]
    for _ in range(4):
        for averager, weight, done in zip(averagers, weights, rounds, strict=True):
            done.append(averager.average_parameters([weight]))
    assert [[done.step for done in each if done] for each in rounds] == [[0, 2], [0, 2]]
    assert [weight.flatten()[0].item() for weight in weights] == [0.5, 10.5]


@pytest.mark.ranks(2)
def test_ranks_that_take_two_averagers_in_another_order_find_out(rank):
    averagers = [PeriodicModelAverager(period=2, name=name, timeout=10) for name in ("generator", "discriminator")]
    weights = parameter(rank)
    with pytest.raises(Exception, match="'generator'.*'discriminator'|'discriminator'.*'generator'"):
        averagers[rank].average_parameters([weights])
    assert weights[0].item() == rank


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("period", "warmup_steps"), [(2, 0), (3, 2), (4, 5)])
def test_every_step_follows_the_reference(rank, size, period, warmup_steps):
    start = np.arange(size * 3, dtype=float).reshape(size, 3)
    expected = reference.local_sgd(
        start, 11, period, lambda step, w: w + (step + 1) * np.arange(1, size + 1)[:, None], warmup_steps
    )
    weights = torch.nn.Parameter(torch.tensor(start[rank], dtype=torch.float64))
    averager = PeriodicModelAverager(period, warmup_steps)
    for step in range(11):
        train(averager, weights, 1, drift=(step + 1) * (rank + 1))
        np.testing.assert_allclose(weights.detach().numpy(), expected[step][rank], rtol=1e-14)


@pytest.mark.ranks(2)
def test_gradient_accumulation_counts_optimizer_steps(rank):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = PeriodicModelAverager(period=3, warmup_steps=2)
    rounds = []
    for micro_batch in range(1, 25):
        model(torch.randn(2, 3)).mean().backward()
        if micro_batch % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            if averager.average_parameters(model.parameters()):
                rounds.append(micro_batch)
    # Warm-up 2: the first round comes with the third optimizer step, after twelve micro-batches, then every twelve.
    assert rounds == [12, 24]


@pytest.mark.ranks(2)
def test_a_scaler_that_skips_a_step_on_one_rank_does_not_shift_the_count(rank):
    weights = parameter(0)
    averager = PeriodicModelAverager(period=4)
    rounds = []
    for step in range(8):
        skipped = rank == 1 and step == 2
        if not skipped:
            with torch.no_grad():
                weights.add_(1.0)
        rounds.append(averager.average_parameters([weights]))
    assert [done.step for done in rounds if done] == [0, 4]
    assert averager.step == 8
    # Step 0: both 1. Up to step 4: rank 0 adds 4, rank 1 adds 3, the mean is 4.5. Three more steps on both.
    assert weights[0].item() == 7.5


@pytest.mark.ranks(2)
def test_a_step_that_one_rank_does_not_count_is_an_error_with_both_numbers(rank):
    weights = parameter(rank)
    averager = PeriodicModelAverager(period=4, timeout=10)
    with (
        pytest.raises(StepMismatchError, match="rank 1 left the averager after 8 steps.*rank 0 entered a round with 9"),
        averager,
    ):
        for step in range(9):
            if not (rank == 1 and step == 2):
                averager.average_parameters([weights])


@pytest.mark.ranks(2, 3)
def test_a_missed_step_shows_at_the_end_even_without_a_round(rank, size):
    averager = PeriodicModelAverager(period=100, timeout=10)
    weights = parameter(rank)
    last = size - 1
    with pytest.raises(StepMismatchError, match=rf"rank {last} at step 6, ranks? 0.* at step 7"), averager:
        train(averager, weights, 6 if rank == last else 7)


@pytest.mark.ranks(2)
def test_equal_counts_leave_in_peace(rank):
    for steps in (0, 3, 8):
        weights = parameter(rank)
        with PeriodicModelAverager(period=4, warmup_steps=2) as averager:
            train(averager, weights, steps)
        assert averager.step == steps


@pytest.mark.ranks(2, 4)
def test_a_resumed_run_has_the_rounds_of_an_unbroken_one(rank, size):
    def run(stops):
        weights, averager, rounds, done = parameter(rank), PeriodicModelAverager(3, warmup_steps=5), [], 0
        for stop in stops:
            rounds += train(averager, weights, stop - done, drift=rank + 1)
            done = stop
            saved, kept = averager.state_dict(), weights.detach().clone()
            averager, weights = PeriodicModelAverager(3, warmup_steps=5), torch.nn.Parameter(kept)
            averager.load_state_dict(saved)
        return rounds, weights.tolist()

    unbroken, resumed = run([14]), run([7, 14])
    assert unbroken == resumed
    assert unbroken[0] == reference.periodic_rounds(14, 3, 5) == [5, 8, 11]


@pytest.mark.ranks(2)
def test_a_checkpoint_without_the_counter_warns_on_every_rank(rank):
    averager = PeriodicModelAverager(4)
    with pytest.warns(UserWarning, match="no averager step"):
        averager.load_state_dict({"epoch": 3})


@pytest.mark.ranks(2)
def test_a_checkpoint_loaded_on_one_rank_is_noticed(rank):
    averager, weights = PeriodicModelAverager(period=3, warmup_steps=5, timeout=10), parameter(rank)
    if rank == 0:
        averager.load_state_dict({"step": 7})
    with pytest.raises(StepMismatchError, match="rank 1 at step 5, rank 0 at step 8"):
        train(averager, weights, 10, drift=0)
    assert weights[0].item() == rank, "nothing was changed"


@pytest.mark.ranks(2)
def test_a_step_that_drifts_later_is_noticed_in_the_round_itself(rank):
    averager, weights = PeriodicModelAverager(period=2, timeout=10), parameter(rank)
    train(averager, weights, 3, drift=0)
    before = weights.tolist()
    averager.step += 2 * rank
    with pytest.raises(StepMismatchError, match="rank 0 at step 4, rank 1 at step 6"):
        train(averager, weights, 3, drift=0)
    assert weights.tolist() == before
    averager.step = 4
    assert train(averager, weights, 1) == [4], "ranks that agree again go on"
