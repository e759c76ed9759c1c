"""The contract of the periodic averager that needs no other rank."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import timeit
import warnings

import pytest
import reference
import torch
from torch.distributed.algorithms.model_averaging import averagers as upstream

from hvd_averaging import (
    HorovodNotInitializedError,
    ModelAverager,
    PeriodicModelAverager,
    average_parameters,
    broadcast_parameters,
    check_replicas,
)


@pytest.mark.parametrize(("period", "warmup_steps"), [(1, 0), (2, 0), (4, 0), (4, 3), (3, 5), (5, 7), (100, 2)])
@pytest.mark.filterwarnings("ignore:With period=1")
def test_due_steps_follow_the_definition(period, warmup_steps):
    averager = PeriodicModelAverager(period, warmup_steps)
    due = [step for step in range(40) if averager.due(step)]
    assert due == reference.periodic_rounds(40, period, warmup_steps)


@pytest.mark.parametrize("arguments", [(0,), (-1,), (4, -1)])
def test_wrong_numbers_are_refused_as_upstream_refuses_them(arguments):
    with pytest.raises(ValueError, match=r"period|warmup_steps"):
        PeriodicModelAverager(*arguments)
    with pytest.raises(ValueError, match=r"period|warmup_steps"):
        upstream.PeriodicModelAverager(*arguments, process_group=object())


@pytest.mark.parametrize("arguments", [(2.5,), ("4",), (4, 1.5), (None,)])
def test_steps_are_whole_numbers(arguments):
    with pytest.raises(TypeError):
        PeriodicModelAverager(*arguments)


def test_period_one_warns():
    with pytest.warns(UserWarning, match="period=1"):
        PeriodicModelAverager(1)


@pytest.mark.parametrize("option", [{"timeout": 0}, {"timeout": -1}, {"timeout": float("nan")}, {"bucket_bytes": 0}])
def test_wrong_options_are_refused(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        PeriodicModelAverager(4, **option)


def test_process_group_is_another_name_for_process_set():
    class SomeSet:
        process_set_id = 7

    some = SomeSet()
    assert PeriodicModelAverager(4, process_group=some).process_set is some
    with pytest.raises(TypeError, match="only one"):
        PeriodicModelAverager(4, process_set=some, process_group=some)


@pytest.mark.parametrize("wrong", [[0, 1], 3, "world"])
def test_something_else_than_a_process_set_is_refused(wrong):
    with pytest.raises(TypeError, match="ProcessSet"):
        PeriodicModelAverager(4, process_set=wrong)
    with pytest.raises(TypeError, match="ProcessSet"):
        average_parameters([torch.ones(1)], wrong)


def test_calls_without_a_round_only_count():
    parameter = torch.nn.Parameter(torch.ones(3))
    averager = PeriodicModelAverager(period=4, warmup_steps=3)
    assert averager.step == 0
    assert [averager.average_parameters([parameter]) for _ in range(3)] == [None] * 3
    assert averager.step == 3
    assert parameter.tolist() == [1, 1, 1]


@pytest.mark.parametrize("call", [average_parameters, broadcast_parameters, check_replicas])
def test_without_init_the_error_says_which_one_to_call(call):
    with pytest.raises(HorovodNotInitializedError, match=r"import horovod\.torch as hvd; hvd\.init\(\)"):
        call([torch.nn.Parameter(torch.ones(1))])
    averager = PeriodicModelAverager(2)
    with pytest.raises(HorovodNotInitializedError):
        averager.average_parameters([torch.nn.Parameter(torch.ones(1))])
    assert averager.step == 0, "a step that failed is not counted"


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (5, "model.parameters"),
        ("weights", "model.parameters"),
        (torch.ones(2), r"put it in a list, \[tensor\]"),
        ([1.0, 2.0], "not a tensor"),
        ([torch.ones(2), None], "'1' is a NoneType"),
        ({"a": "b"}, "'a' is a str"),
    ],
)
def test_other_things_than_parameters_are_refused(params, says):
    with pytest.raises(TypeError, match=says):
        average_parameters(params)


def test_a_spent_iterator_is_refused():
    parameters = torch.nn.Linear(2, 2).parameters()
    list(parameters)
    with pytest.raises(ValueError, match="nothing in it"):
        average_parameters(parameters)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.ones(1).expand(3), "contiguous"),
        (torch.eye(2).to_sparse(), "dense"),
        (torch.nn.LazyLinear(3).weight, "one batch"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.ones(2, dtype=torch.complex64).conj(), "resolve_conj"),
    ],
)
def test_tensors_that_cannot_be_written_in_place_are_refused_by_name(tensor, says):
    with pytest.raises((TypeError, ValueError), match=f"'bad' .*{says}"):
        average_parameters({"good": torch.ones(2), "bad": tensor})


def test_a_subclass_needs_no_more_than_when_and_its_description():
    class Doubling(ModelAverager):
        def due(self, step):
            return step & (step - 1) == 0 and step > 0

        def describe(self):
            return "Doubling()"

    averager = Doubling()
    assert [step for step in range(9) if averager.due(step)] == [1, 2, 4, 8]
    with pytest.raises(TypeError, match="abstract"):
        ModelAverager()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda averager: pickle.loads(pickle.dumps(averager))])
def test_a_copy_goes_on_where_the_original_was(copied):
    averager = PeriodicModelAverager(period=3, warmup_steps=5, name="mine", timeout=7)
    parameter = torch.nn.Parameter(torch.ones(1))
    for _ in range(4):
        averager.average_parameters([parameter])
    twin = copied(averager)
    assert (twin.step, twin.period, twin.warmup_steps, twin.name) == (4, 3, 5, "mine")
    twin.average_parameters([torch.nn.Parameter(torch.ones(1))])
    assert (twin.step, averager.step) == (5, 4)


def test_state_dict_holds_the_step():
    averager = PeriodicModelAverager(4, 100)
    averager.average_parameters([torch.nn.Parameter(torch.ones(1))])
    assert averager.state_dict() == {"step": 1}
    other = PeriodicModelAverager(4, 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(averager.state_dict())
    assert other.step == 1


def test_a_checkpoint_without_the_step_warns():
    averager = PeriodicModelAverager(4)
    averager.step = 9
    with pytest.warns(UserWarning, match="no averager step"):
        averager.load_state_dict({})
    assert averager.step == 0


@pytest.mark.parametrize("period", [1, 2, 5])
@pytest.mark.filterwarnings("ignore:With period=1")
def test_one_averager_for_two_optimizers_is_an_error(period):
    one, two = (torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1) for _ in range(2))
    for first, second in [
        (one.param_groups, two.param_groups),
        (iter(one.param_groups[0]["params"]), iter(two.param_groups[0]["params"])),
        (one, two),
        ({"w": one.param_groups[0]["params"][0]}, {"w": two.param_groups[0]["params"][0]}),
    ]:
        averager = PeriodicModelAverager(period, warmup_steps=100)
        averager.average_parameters(first)
        with pytest.raises(ValueError, match="one averager for each optimizer"):
            averager.average_parameters(second)
        assert averager.step == 1


def test_parameters_that_are_gone_may_be_replaced():
    averager = PeriodicModelAverager(4, warmup_steps=100)
    for _ in range(3):
        averager.average_parameters([torch.nn.Parameter(torch.ones(2))])
    assert averager.step == 3


def test_a_call_without_a_round_costs_the_same_for_any_number_of_parameters():
    few, many = ([torch.nn.Parameter(torch.zeros(1)) for _ in range(count)] for count in (10, 10_000))
    averagers = [PeriodicModelAverager(10**9, 10**9) for _ in range(2)]
    seconds = [
        min(timeit.repeat(lambda: averager.average_parameters(params), number=2000, repeat=7))  # noqa: B023
        for averager, params in zip(averagers, (few, many), strict=True)
    ]
    assert seconds[1] < 3 * seconds[0]


def test_importing_the_package_imports_no_framework():
    check = (
        "import sys, hvd_averaging; print([m for m in ('torch', 'tensorflow', 'keras', 'horovod') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_all_public_names_exist():
    import hvd_averaging

    for name in hvd_averaging.__all__:
        assert getattr(hvd_averaging, name).__doc__, name
    assert set(hvd_averaging.__all__) <= set(dir(hvd_averaging))
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = hvd_averaging.nothing_like_this


def test_a_forbidden_tensorflow_is_none_at_all(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)  # the usual way to have its import fail
    averager = PeriodicModelAverager(4, warmup_steps=10)
    assert averager.average_parameters([torch.zeros(3)]) is None and averager.step == 1
