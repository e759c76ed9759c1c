"""Draws what ``benchmarks/suite.py`` has measured, as a PNG: a round beside others', and training over slow links."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from bars import Result, find
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from two_hosts import bits_per_second

# From the palette of Okabe and Ito, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
OURS, OTHERS = "#0072B2", "#8c8c8c"


def draw(results: Sequence[Result], path: Path) -> Path | None:
    """One panel for the rounds of each backend, and one for training; nothing if nothing of that was measured."""
    rounds = [
        find(results, kind="round", shapes="resnet50", framework="torch", ranks=2, link="", backend=backend)
        for backend in ("Open MPI", "Gloo")
    ]
    shown = [each for each in rounds if each]
    trainings = sorted((each for each in results if each["kind"] == "end to end"), key=speed_of_link)
    panels = len(shown) + bool(trainings)
    if not panels:
        return None
    figure = Figure(figsize=(6.2 * panels, 4.8), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for result in shown:
        draw_round(axes.pop(0), result)
    if trainings:
        draw_training(axes.pop(0), trainings)
    figure.savefig(path, dpi=120, bbox_inches="tight", pad_inches=0.2)
    return path.resolve()


def speed_of_link(result: Result) -> float:
    return bits_per_second(result["link"])


def draw_round(axes: Axes, result: Result) -> None:
    """A bar for the median of each contestant, the fastest on top, with a line from quartile to quartile."""
    names = sorted(result["seconds"], key=lambda name: float(result["median_seconds"][name]), reverse=True)
    times = [[1e3 * each for each in result["seconds"][name]] for name in names]
    medians = [statistics.median(each) for each in times]
    quartiles = [statistics.quantiles(each, n=4, method="inclusive") if len(each) > 1 else 3 * each for each in times]
    spread = [
        [median - low for median, (low, _, _) in zip(medians, quartiles, strict=True)],
        [high - median for median, (_, _, high) in zip(medians, quartiles, strict=True)],
    ]
    colours = [OURS if name.startswith("ours") else OTHERS for name in names]
    axes.barh(names, medians, xerr=spread, color=colours, ecolor="#404040")
    dress(axes, f"A round over ResNet-50's parameters, {result['backend']}", "milliseconds, two ranks", grid="x")


def draw_training(axes: Axes, trainings: Sequence[Result]) -> None:
    """A line for each way, over the speed of the link, both logarithmic."""
    for name, colour in zip(trainings[-1]["median_samples_per_second"], COLOURS, strict=False):
        points = [
            (speed_of_link(each) / 1e6, each["median_samples_per_second"][name])
            for each in trainings
            if name in each["median_samples_per_second"]
        ]
        axes.plot(*zip(*points, strict=True), "o-", color=colour, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8)
    dress(axes, "Training with ResNet-50's traffic, samples per second", "link between two hosts, Mbit/s", grid="y")


def dress(axes: Axes, title: str, label: str, grid: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, weight="bold")
    axes.set_xlabel(label)
    axes.grid(axis="x" if grid == "x" else "y", color="#e4e4e4")
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines[["top", "right"]].set_visible(False)
