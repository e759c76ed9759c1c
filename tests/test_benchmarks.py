"""The benchmark with stragglers: what it expects, against a simulation, and that it runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

STRAGGLERS = Path(__file__).parents[1] / "benchmarks" / "stragglers.py"


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
