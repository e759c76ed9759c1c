"""How long one round takes, beside what Horovod itself, MPI and torch.distributed take for the same parameters.

    horovodrun -np 2 python benchmarks/round.py
    horovodrun -np 2 --mpi python benchmarks/round.py --repeats 30 --json round.json
    horovodrun -np 2 python benchmarks/round.py --framework tensorflow
    horovodrun -np 4 python benchmarks/round.py --shapes 10x10MB 2000x10MB --only packed flat grouped

The contestants take turns inside one run, in a new order each time, so that a noisy machine is equally noisy for all
of them; what counts is the ratio of medians.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import random
import statistics
import time
import timeit
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shapes
from contestants import DELAYED, FLAT, FRAMEWORKS, PACKED, TENSORFLOW, Calls, Makers, threads_per_rank
from rich import box
from rich.console import Console
from rich.table import Table

from hvd_averaging import PeriodicModelAverager

OURS = (FLAT, PACKED, TENSORFLOW)  # what the others are compared with
CYCLE_SECONDS = 1e-3  # how often Horovod looks for work, by default
PARAMETER_COUNTS = (10, 10_000)  # for the time of a call at a step that has no round


def choose(makers: Makers, words: Sequence[str] | None) -> dict[str, Calls]:
    """Make the contestants whose name holds one of the words; all, if there are no words."""
    chosen = [name for name in makers if words is None or any(word in name for word in words)]
    return {name: makers[name]() for name in chosen}


def measure(hvd: Any, contestants: dict[str, Calls], repeats: int, warm_up: int = 3) -> dict[str, list[float]]:
    """Seconds of every turn, the contestants taking turns in an order that is drawn anew each time."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    longest = 0.0
    for repeat in range(warm_up + repeats):
        draw = random.Random(repeat)  # the same on all ranks
        for name in draw.sample(list(contestants), len(contestants)):
            hvd.broadcast_object(0, name="line_up")  # a barrier, which horovod.tensorflow lacks
            # Or who looks at parameters first would always just miss a cycle of Horovod's, and others never.
            time.sleep(draw.uniform(0, 3 * CYCLE_SECONDS))
            passed = run(contestants[name], pause=2 * longest)
            if repeat >= warm_up:
                seconds[name].append(passed)
            else:
                longest = max(longest, passed)
    return seconds


def run(calls: Calls, pause: float) -> float:
    """Seconds of one turn, without the pauses."""
    passed = 0.0
    for number, call in enumerate(calls):
        if number > 0:
            time.sleep(pause)
        started = time.perf_counter()
        call()
        passed += time.perf_counter() - started
    return passed


def seconds_without_round(count: int, calls: int = 100_000) -> float:
    """Seconds of one ``average_parameters`` call with so many parameters, at a step that has no round."""
    idle = PeriodicModelAverager(period=10**9, warmup_steps=10**9)

    class Parameter:
        pass

    parameters = [Parameter() for _ in range(count)]
    return min(timeit.repeat(lambda: idle.average_parameters(parameters), number=calls, repeat=5)) / calls


def result(hvd: Any, framework: str, name: str, link: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """What goes into the JSON for one set of shapes, ratios first: every ``median / other`` of ours."""
    medians = {contestant: statistics.median(times) for contestant, times in seconds.items()}
    ours = [contestant for contestant in OURS if contestant in medians]
    return {
        "ratios": {one: {other: round(medians[one] / medians[other], 4) for other in medians} for one in ours},
        "kind": "round",
        "shapes": name,
        "framework": framework,
        "ranks": hvd.size(),
        "backend": "Open MPI" if hvd.mpi_enabled() else "Gloo",
        "link": link,
        "threads_per_rank": threads_per_rank(hvd),
        "median_seconds": {contestant: round(median, 6) for contestant, median in medians.items()},
        "seconds": {contestant: [round(each, 6) for each in times] for contestant, times in seconds.items()},
    }


def table(result: dict[str, Any]) -> Table:
    title = f"One round: {shapes.describe(result['shapes'])}, {result['framework']}, {result['ranks']} ranks, "
    title += result["backend"] + (f", {result['link']}" if result["link"] else "")
    caption = "Quartiles in brackets. "
    if DELAYED in result["seconds"]:
        caption += "Delayed: only what the training loop waits for."
    shown = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    shown.title_justify = shown.caption_justify = "left"
    shown.add_column(no_wrap=True)
    for heading in (*(f"{one.removeprefix('ours, ')} / this" for one in result["ratios"]), "median ms", ""):
        shown.add_column(heading, justify="right")
    for name, times in result["seconds"].items():
        low, median, high = (f"{1e3 * each:.3g}" for each in quartiles(times))
        ratios = (f"{ratios[name]:.2f}" for ratios in result["ratios"].values())
        shown.add_row(name, *ratios, median, f"({low} to {high})")
    return shown


def quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    if len(times) == 1:
        return (times[0],) * 3
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, median, high


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    option = parser.add_argument
    option("--framework", choices=FRAMEWORKS, default="torch", help="default: %(default)s")
    option("--shapes", nargs="+", default=["resnet50"], help=f"{', '.join(shapes.MODELS)} or like 300x10MB")
    option("--only", nargs="+", metavar="WORD", help="contestants whose name holds one of these words")
    option("--repeats", type=int, default=20, help="timed turns of each contestant (default: %(default)s)")
    option("--link", default="", help="what lies between the ranks, for the title and the JSON")
    option("--json", type=Path, help="also write every time and ratio to this file")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error("--repeats is at least 1")
    try:
        for name in arguments.shapes:
            shapes.named(name)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main() -> None:
    arguments = parse()
    hvd = importlib.import_module(f"horovod.{arguments.framework}")
    hvd.init()
    console = Console(force_terminal=False, highlight=False, quiet=hvd.rank() != 0, width=100)
    results = []
    for name in arguments.shapes:
        makers = FRAMEWORKS[arguments.framework](hvd, shapes.named(name), name).makers()
        contestants = choose(makers, arguments.only)
        if not contestants:
            raise SystemExit(f"round.py: no contestant is called like {arguments.only}, only: {', '.join(makers)}")
        seconds = measure(hvd, contestants, arguments.repeats)
        results.append(result(hvd, arguments.framework, name, arguments.link, seconds))
        console.print("", table(results[-1]), sep="\n")
        del contestants, makers
        gc.collect()  # the next shapes need the memory
    if hvd.rank() == 0:
        idle = {str(count): seconds_without_round(count) for count in PARAMETER_COUNTS}
        said = ", ".join(f"{1e6 * seconds:.2f} µs with {count} parameters" for count, seconds in idle.items())
        console.print(f"\nA call at a step without a round: {said}.")
        for each in results:
            each["seconds_without_round"] = idle
        if arguments.json:
            arguments.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
