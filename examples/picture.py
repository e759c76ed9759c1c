"""Draws accuracy against megabytes sent, as a PNG. Knows only what a contest's ways have in the end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator, PercentFormatter

if TYPE_CHECKING:
    from contest import Way

# From the palette of Okabe and Ito, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
GREY = "#595959"


def draw(ways: Sequence[Way], title: str, sender: str, path: Path) -> Path:
    """One line for each way that sent something, and a level for each that did not."""
    figure = Figure(figsize=(8.5, 4.8), layout="constrained")
    axes = figure.add_subplot()
    dress(axes, title, sender)
    talkers = sorted((way for way in ways if way.megabytes > 0), key=lambda way: way.megabytes)
    for number, (way, colour) in enumerate(zip(talkers, itertools.cycle(COLOURS))):
        draw_line(axes, way, colour, last=way is talkers[-1], raised=number % 2 == 1)
    for way in ways:
        if way.megabytes == 0:
            draw_level(axes, way)
    axes.set_xlim(right=talkers[-1].megabytes)
    axes.set_ylim(max(min(final(way) for way in ways) - 0.1, 0), 1)
    figure.savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.2)
    return path.resolve()


def draw_line(axes: Axes, way: Way, colour: str, last: bool, raised: bool) -> None:
    """Its label stands above its end (``raised``: above its neighbour's), or right of it if no other line goes on."""
    megabytes, accuracies = zip(*way.curve, strict=True)
    axes.plot(megabytes, accuracies, color=colour, linewidth=1.8)
    axes.plot(megabytes[-1], accuracies[-1], "o", color=colour, markersize=8, clip_on=False, zorder=3)
    axes.annotate(
        f"{way.name}\n{final(way):.1%} for {way.megabytes:.3g} MB",
        (megabytes[-1], accuracies[-1]),
        xytext=(10, -6) if last else (4, 40 if raised else 8),
        textcoords="offset points",
        ha="left" if last else "right",
        va="bottom",
        color=colour,
        weight="bold",
    )


def draw_level(axes: Axes, way: Way) -> None:
    axes.axhline(final(way), color=GREY, linewidth=1.4, linestyle=(0, (5, 3)))
    axes.annotate(
        f"{way.name}\n{final(way):.1%}, nothing sent",
        (1, final(way)),
        xycoords=axes.get_yaxis_transform(),
        xytext=(10, 6),
        textcoords="offset points",
        ha="left",
        va="top",
        color=GREY,
        weight="bold",
    )


def dress(axes: Axes, title: str, sender: str) -> None:
    axes.set_title(title, loc="left", fontsize=13, weight="bold", pad=14)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.set_xlabel(f"megabytes sent by {sender} (logarithmic)")
    axes.set_ylabel("test accuracy")
    axes.grid(axis="y", color="#e4e4e4")
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def final(way: Way) -> float:
    return way.curve[-1][1]
