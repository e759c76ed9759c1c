"""How long one round takes, beside what Horovod itself takes for the same parameters.

    horovodrun -np 2 python benchmarks/round.py
    horovodrun -np 2 --mpi python benchmarks/round.py --repeats 30 --json round.json

The contestants take turns inside one run, so that a noisy machine is equally noisy for all of them; what counts is the
ratio of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import timeit
import warnings
from collections.abc import Callable
from pathlib import Path

import horovod.torch as hvd
import torch
from rich.console import Console
from rich.table import Table
from shapes import resnet50

from hvd_averaging import PeriodicModelAverager

OURS = "hvd_averaging round"
GROUPED = "hvd.grouped_allreduce_"
FLAT = "hvd.allreduce_, one flat tensor"


def contestants() -> dict[str, Callable[[], object]]:
    shapes = resnet50()
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    tensors = [torch.randn(shape) for shape in shapes]
    flat = torch.randn(sum(tensor.numel() for tensor in tensors))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # period=1: here every call is to be a round
        averager = PeriodicModelAverager(period=1)
    return {
        OURS: lambda: averager.average_parameters(parameters),
        GROUPED: lambda: hvd.grouped_allreduce_(tensors, name="grouped", op=hvd.Average),
        FLAT: lambda: hvd.allreduce_(flat, name="flat", op=hvd.Average),
    }


def measure(functions: dict[str, Callable[[], object]], repeats: int, warm_up: int = 3) -> dict[str, list[float]]:
    """Seconds of every call, the functions taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(warm_up + repeats):
        for name, function in functions.items():
            hvd.barrier()
            started = time.perf_counter()
            function()
            if repeat >= warm_up:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def seconds_without_round(calls: int = 100_000) -> float:
    """Seconds of one ``average_parameters`` call at a step that has no round."""
    averager = PeriodicModelAverager(period=10**9, warmup_steps=10**9)
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(161)]
    return min(timeit.repeat(lambda: averager.average_parameters(parameters), number=calls, repeat=5)) / calls


def report(seconds: dict[str, list[float]], idle: float) -> dict[str, object]:
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    backend = "Open MPI" if hvd.mpi_enabled() else "Gloo"
    table = Table(title=f"One round, ResNet-50 shapes (161 tensors, 25.6 M fp32), {hvd.size()} ranks, {backend}")
    for column in ("", "median ms", "best ms", "ours / this"):
        table.add_column(column, justify="left" if not column else "right")
    for name, median in medians.items():
        table.add_row(name, f"{1e3 * median:.1f}", f"{1e3 * min(seconds[name]):.1f}", f"{medians[OURS] / median:.2f}")
    console = Console(force_terminal=False, highlight=False)  # launchers put tags before every line
    console.print(table)
    console.print(f"A call at a step without a round: {1e6 * idle:.2f} µs.")
    return {
        "ranks": hvd.size(),
        "backend": backend,
        "seconds": seconds,
        "median_seconds": medians,
        "ours_to_this": {name: medians[OURS] / median for name, median in medians.items()},
        "seconds_without_round": idle,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each contestant (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write every time and ratio to this file")
    arguments = parser.parse_args()
    hvd.init()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))  # ranks that fight for cores measure that
    seconds = measure(contestants(), arguments.repeats)
    if hvd.rank() == 0:
        results = report(seconds, seconds_without_round())
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
