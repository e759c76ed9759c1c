"""The benchmarks: that they run, and what that with stragglers expects, against a simulation."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
STRAGGLERS = BENCHMARKS / "stragglers.py"


@pytest.fixture(scope="module")
def benchmark():
    return runpy.run_path(str(STRAGGLERS))


def simulate(levels, probability, blocks):
    """Stalls per step, from a clock for every rank that its group sets to the latest of its clocks in every round."""
    random = np.random.default_rng(7)
    clocks = np.zeros((blocks, max(levels.values())))
    for step in range(1, max(levels) + 1):
        clocks += random.random(clocks.shape) < probability
        for period, size in levels.items():
            if step % period == 0:
                groups = clocks.reshape(blocks, -1, size)
                clocks = groups.max(axis=2, keepdims=True).repeat(size, axis=2).reshape(clocks.shape)
    return clocks.mean() / max(levels)


@pytest.mark.parametrize("levels", [{1: 8}, {4: 8}, {8: 3}, {2: 2, 8: 8}, {1: 2, 3: 6}, {2: 2, 4: 4, 8: 8}])
def test_expected_stalls_are_those_of_a_simulation(benchmark, levels):
    expected = benchmark["expected_stalls"](levels, 1 / 8)
    assert expected == pytest.approx(simulate(levels, 1 / 8, blocks=50_000), rel=0.01)


def test_expected_gains_for_eight_ranks(benchmark):
    milliseconds = [5 + 50 * benchmark["expected_stalls"]({period: 8}, 1 / 8) for period in (1, 2, 4, 8)]
    gains = [milliseconds[0] / each for each in milliseconds]
    assert gains == pytest.approx([1, 1.26, 1.57, 1.87], abs=0.005)


@pytest.mark.parametrize(
    ("levels", "per_step"),
    [
        ({1: 4}, 3 / 4),  # in steps 0, 2 and 3 someone stalls
        ({2: 4}, 3 / 4),  # 1 and then 2 stalls
        ({4: 4}, 2 / 4),
        ({2: 2, 4: 4}, 3 / 4),  # the second pair waits 1 + 2 times
    ],
)
def test_stalls_that_happened_are_waited_for_by_the_slowest(benchmark, levels, per_step):
    stalls = [[1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 1]]
    assert benchmark["stalls_waited_for"](np.array(stalls, dtype=bool), levels) == per_step


def test_straggler_benchmark_prints_every_way(horovodrun):
    launched = horovodrun(4, STRAGGLERS, limit=100, args=["--steps", "16", "--step-ms", "1", "--stall-ms", "10"])
    assert launched.returncode == 0, launched.output
    assert "4 ranks over Gloo, 16 steps of 1 ms" in launched.output
    names = ["gradient averaging", "the same, spinning", *(f"every {period} steps" for period in (2, 4, 8))]
    for name in [*names, "{2: 2, 8: 4}"]:
        row = re.search(rf"{re.escape(name)} +([\d.]+) +-?[\d.]+ +([\d.]+) +([\d.]+) +([\d.]+)\s", launched.output)
        assert row, f"no row for {name!r} in:\n{launched.output}"
        assert min(map(float, row.groups())) > 0


def test_straggler_benchmark_refuses_broken_blocks(benchmark, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["stragglers.py", "--steps", "12"])
    with pytest.raises(SystemExit):
        benchmark["parse"]()
    assert "--steps 12 is not a multiple of 8" in capsys.readouterr().err


def test_round_benchmark_compares_with_others(horovodrun, tmp_path):
    options = ["--shapes", "3x12KB", "20x1MB", "--only", "ours, flat", "Averager", "--repeats", "1", "--json"]
    launched = horovodrun(2, BENCHMARKS / "round.py", limit=60, args=[*options, str(tmp_path / "round.json")])
    assert launched.returncode == 0, launched.output
    small, large = json.loads((tmp_path / "round.json").read_text())
    assert (small["shapes"], large["shapes"], small["ranks"]) == ("3x12KB", "20x1MB", 2)
    assert list(small["ratios"]) == ["ours, flat"]
    assert {"ours, flat", "ours, flat, one tensor", "torch's PeriodicModelAverager"} == small["seconds"].keys()
    assert min(map(min, small["seconds"].values())) > 0


def test_training_benchmark_stops_at_the_accuracy_or_the_limit(horovodrun, tmp_path):
    options = ["--ballast", "5x20KB", "--turns", "2", "--seconds", "2", "--accuracy", "0.5", "--only"]
    ways = ["hvd.DistributedOptimizer", "period 32, delay 16", "period 8, int8"]
    arguments = [*options, *ways, "--json", str(tmp_path / "training.json")]
    launched = horovodrun(2, BENCHMARKS / "end_to_end.py", limit=60, args=arguments)
    assert launched.returncode == 0, launched.output
    [result] = json.loads((tmp_path / "training.json").read_text())
    assert list(result["ratios"]) == ways
    for way in ways:
        seconds, reached = result["seconds_to_accuracy"][way], result["curves"][way]
        assert (seconds is None) == all(accuracy < 0.5 for _, accuracy in reached)
        assert min(result["samples_per_second"][way]) > 0


def test_bars_say_what_is_met_and_what_was_not_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bars = runpy.run_path(str(BENCHMARKS / "bars.py"))["bars"]
    medians = {"ours, packed": 1.0, "ours, fp16": 0.7, "ours, int8": 0.3}
    round_ = {"kind": "round", "ranks": 2, "shapes": "resnet50", "backend": "Gloo", "link": "1gbit"}
    training = {"kind": "end to end", "link": "1gbit", "ratios": {"period 32": 9.0}}
    verdicts = {bar.what: bar.verdict for bar in bars([{**round_, "median_seconds": medians}, training])}
    assert verdicts["ours, fp16 / fp32, 1 Gbit"] == "not met"
    assert verdicts["ours, int8 / fp32, 1 Gbit"] == "met"
    assert verdicts["samples/s, period 32 / hvd.DistributedOptimizer, 1 Gbit"] == "met"
    assert sorted(verdicts.values()).count("not measured") == len(verdicts) - 3


def test_what_was_measured_before_is_not_measured_again(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    suite = importlib.import_module("suite")
    launched, path, described = [], tmp_path / "full.json", {"cores": 2, "date": "then"}

    def run(measurement, hosts):
        launched.append(measurement.label)
        return suite.Launched(0, ""), ([] if len(launched) == 2 else [{"kind": "round"}])

    monkeypatch.setattr(suite, "run", run)
    results = suite.load(path, described)
    failures = suite.measure(["rounds"], True, results, lambda kept: suite.save(path, described, kept))
    plan = list(launched)
    assert len(set(plan)) == len(plan) == 6 and failures == [f"{plan[1]} failed: exit code 0"]

    results = suite.load(path, {**described, "date": "now"})
    suite.measure(["rounds"], True, results, lambda kept: suite.save(path, described, kept))
    assert launched[6:] == [plan[1]], "what failed, once more"
    assert sorted(result["launch"] for result in suite.load(path, described)) == sorted(plan)
    with pytest.raises(SystemExit, match=r"other versions \(cores\)"):
        suite.load(path, {"cores": 4})


def test_shapes_by_name(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    shapes = importlib.import_module("shapes")
    counts = {name: (len(shapes.named(name)), shapes.elements(shapes.named(name))) for name in shapes.MODELS}
    assert counts == {"resnet50": (161, 25_557_032), "gpt2_small": (148, 124_439_808)}
    assert shapes.named("3x40KB") == [(3334,), (3333,), (3333,)]
    with pytest.raises(ValueError, match="neither one of resnet50, gpt2_small"):
        shapes.named("huge")


def test_two_hosts_run_a_script_and_leave_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import horovod.torch as hvd, torch\nhvd.init()\n"
        "print(hvd.local_size(), hvd.size(), hvd.allreduce(torch.ones(1), op=hvd.Sum).item())\n"
    )
    command = [sys.executable, str(BENCHMARKS / "two_hosts.py"), "--link", "1gbit", "--limit", "60", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL)
    if "two hosts on one machine" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip(done.stderr.strip())  # no root, no sshd, or a container that must not make namespaces
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("1 2 2.0") == 2
    assert not list(Path("/etc/netns").glob("hvd-averaging-bench-*"))
    assert not list(Path("/run/netns").glob("hvd-averaging-bench-*"))
