"""Several averagers in one step: their rounds are under way at the same time."""

from __future__ import annotations

import functools

import horovod.torch as hvd
import pytest
import torch

from hvd_averaging import AveragingError, PeriodicModelAverager, StepMismatchError, average_together, process_sets
from hvd_averaging.channel import Channel
from hvd_averaging.torch import flatten_parameters

on_gloo = functools.partial(pytest.mark.ranks, backends=("gloo",))
dynamic = functools.partial(pytest.mark.ranks, backends=("gloo",), env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})


def weights_of(rank, count=3):
    return torch.full((count,), float(rank))


@pytest.mark.ranks(2)
def test_each_step_is_that_of_each_averager(rank):
    every_2, every_3 = PeriodicModelAverager(2, name="two"), PeriodicModelAverager(3, 1, name="three")
    late = PeriodicModelAverager(3, delay=1, name="late")
    some, others, more = weights_of(rank), weights_of(10 * rank), weights_of(rank)
    seen = []
    for _ in range(5):
        some += rank
        done = average_together((every_2, [some]), (every_3, [others]), (late, [more]))
        seen.append([round_ and round_.step for round_ in done])
    assert seen == [[0, None, None], [None, 1, 0], [2, None, None], [None, None, None], [4, 4, 3]]
    assert (every_2.step, every_3.step, late.step) == (5, 5, 5)
    assert (some == 0.5 + 5 * 0.5).all() and (others == 5).all() and (more == 0.5).all()


@on_gloo(2)
@pytest.mark.parametrize("kind", ["packed", "flat", "wire", "buckets"])
def test_all_are_begun_before_any_is_waited_for(rank, kind, monkeypatch):
    options = {"wire": {"wire": "int8"}, "buckets": {"bucket_bytes": 8}}.get(kind, {})
    averagers = [PeriodicModelAverager(2, name=f"{kind} {number}", **options) for number in range(3)]
    models = [torch.nn.Linear(3, 2, bias=False) for _ in averagers]
    for model in models:
        torch.nn.init.constant_(model.weight, float(rank))
        if kind == "flat":
            flatten_parameters(model)
    pairs = list(zip(averagers, models, strict=True))
    average_together(*pairs)  # agrees, which takes talk
    average_together(*pairs)
    events = []

    def noted(what, method):
        def call(self, *args):
            events.append(what)
            return method(self, *args)

        return call

    monkeypatch.setattr(Channel, "begin", noted("begin", Channel.begin))
    monkeypatch.setattr(Channel, "complete", noted("wait", Channel.complete))
    average_together(*pairs)
    # Each asks for the rest once it has waited for its header, which when packed was all.
    assert events == ["begin"] * 3 + ["wait", "begin"] * 3 + ["wait"] * (0 if kind == "packed" else 3)
    assert all((model.weight == 0.5).all() for model in models)


@dynamic(4)
def test_averagers_of_different_process_sets(rank):
    pairs = [process_sets.of([0, 1]), process_sets.of([2, 3])]
    mine, everyone = weights_of(rank), weights_of(rank)
    local = PeriodicModelAverager(2, process_set=pairs[rank // 2], name="pair")
    done = average_together((local, [mine]), (PeriodicModelAverager(2), [everyone]))
    assert [round_.ranks for round_ in done] == [2, 4]
    assert (mine == (0.5 if rank < 2 else 2.5)).all() and (everyone == 1.5).all()


@on_gloo(2)
def test_an_error_of_one_leaves_the_others_whole(rank):
    one, other, third = (PeriodicModelAverager(2, name=name) for name in ("one", "other", "third"))
    weights = [weights_of(rank) for _ in range(3)]
    other.step = 2 * rank
    with pytest.raises(StepMismatchError, match="other"):
        average_together((one, [weights[0]]), (other, [weights[1]]), (third, [weights[2]]))
    assert [float(weight[0]) for weight in weights] == [0.5, rank, 0.5]
    assert (one.step, other.step, third.step) == (1, 2 * rank, 1)


@on_gloo(2)
def test_a_fault_before_the_round_does_so_too(rank):
    one, other = (PeriodicModelAverager(2, name=name) for name in ("one", "other"))
    weights = weights_of(rank)
    with pytest.raises(TypeError, match="not a tensor"):
        average_together((other, ["nothing to average"]), (one, [weights]))
    assert (weights == 0.5).all() and (one.step, other.step) == (1, 0)
    assert average_together() == []


@on_gloo(2)
def test_averagers_of_one_name_say_so_where_they_are_in_each_others_way(rank):
    weights = [weights_of(rank), weights_of(rank)]
    one, other = PeriodicModelAverager(2, delay=1), PeriodicModelAverager(2, delay=1)
    for averager, weight in ((one, weights[0]), (other, weights[1])):
        for _ in range(2):
            averager.average_parameters([weight])
    for turn in range(2):
        hvd.barrier()  # so that the round of rank 0 is under way, as rank 1 is not there yet
        if rank == turn:
            one.average_parameters(weights[:1])
        if rank == 0 and turn == 0:
            with pytest.raises(AveragingError, match="Give each averager a name of its own"):
                other.average_parameters(weights[1:])
    one.flush()
    assert (one.step, other.step) == (3, 2) and all((weight == 0.5).all() for weight in weights)
