"""The bars that we hold ourselves to, and whether a set of results reaches them. Reported, never asserted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import contestants as names
from end_to_end import GRADIENTS
from rich import box
from rich.table import Table

Result = dict[str, Any]

SMALL_TENSORS = "2000x2.048MB"  # of 1 KB each


@dataclass(frozen=True)
class Bar:
    """``measured`` is to be at most, or with ``at_least`` at least, the ``bar``; ``None`` was not measured."""

    what: str
    bar: float
    measured: float | None
    at_least: bool = False

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        met = self.measured >= self.bar if self.at_least else self.measured <= self.bar
        return "met" if met else "not met"


def bars(results: Sequence[Result]) -> list[Bar]:
    """All on two ranks, as ratios of medians within one run."""

    def ratio(one: str, other: str, shapes: str = "resnet50", **wanted: object) -> float | None:
        return median_ratio(find(results, kind="round", ranks=2, shapes=shapes, **wanted), one, other)

    mpi: dict[str, Any] = {"backend": "Open MPI"}
    gloo: dict[str, Any] = {"backend": "Gloo", "link": ""}
    wire: dict[str, Any] = {"backend": "Gloo", "link": "1gbit"}
    found = [Bar("flat round / MPI_Allreduce of 102 MB, Open MPI", 1.10, ratio(names.FLAT, names.MPI, **mpi))]
    for backend in (mpi, gloo):
        label, flat = backend["backend"], names.FLAT
        small = ratio(flat, names.ONE_TENSOR, SMALL_TENSORS, **backend)
        found += [
            Bar(f"packed round / {names.GROUPED}, {label}", 1.0, ratio(names.PACKED, names.GROUPED, **backend)),
            Bar(f"flat round / torch's averager, {label}", 0.40, ratio(flat, names.TORCH_AVERAGER, **backend)),
            Bar(f"flat round, 2,000 tensors of 1 KB / one tensor, {label}", 1.3, small),
        ]
    idle = find(results, kind="round", framework="torch")
    for count in ("10", "10000"):
        seconds = idle["seconds_without_round"][count] if idle else None
        found.append(Bar(f"µs of a call without a round, {count} parameters", 2, seconds and 1e6 * seconds))
    for name, bar in (("ours, fp16", 0.6), ("ours, int8", 0.4)):
        found.append(Bar(f"{name} / fp32, 1 Gbit", bar, ratio(name, names.PACKED, **wire)))
    gain = (find(results, kind="end to end", link="1gbit") or {"ratios": {}})["ratios"].get("period 32")
    return [*found, Bar(f"samples/s, period 32 / {GRADIENTS}, 1 Gbit", 8, gain, at_least=True)]


def find(results: Sequence[Result], **wanted: object) -> Result | None:
    """The first result that has all of these."""
    return next((each for each in results if wanted.items() <= {key: each.get(key) for key in wanted}.items()), None)


def median_ratio(result: Result | None, one: str, other: str) -> float | None:
    medians = result["median_seconds"] if result else {}
    return medians[one] / medians[other] if one in medians and other in medians else None


def table(found: Sequence[Bar]) -> Table:
    shown = Table(title="The bars, on two ranks", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    shown.title_justify = "left"
    for heading in ("", "bar", "measured", ""):
        shown.add_column(heading, justify="right" if heading else "left")
    for bar in found:
        measured = "" if bar.measured is None else f"{bar.measured:.2f}"
        shown.add_row(bar.what, f"{'≥' if bar.at_least else '≤'} {bar.bar:g}", measured, bar.verdict)
    return shown
