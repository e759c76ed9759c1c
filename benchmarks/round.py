"""How long one round takes, beside what Horovod itself takes for the same parameters.

    horovodrun -np 2 python benchmarks/round.py
    horovodrun -np 2 --mpi python benchmarks/round.py --repeats 30 --json round.json
    horovodrun -np 2 python benchmarks/round.py --framework tensorflow

The contestants take turns inside one run, so that a noisy machine is equally noisy for all of them; what counts is the
ratio of medians.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import time
import timeit
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from shapes import resnet50

from hvd_averaging import PeriodicModelAverager

Contestants = dict[str, Callable[[], object]]

OURS = "hvd_averaging round"
OURS_FLAT = "the same, flatten_parameters"


def averager() -> PeriodicModelAverager:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # period=1: here every call is to be a round
        return PeriodicModelAverager(period=1)


def torch_contestants(hvd: Any) -> Contestants:
    import torch

    from hvd_averaging.torch import flatten_parameters

    torch.set_num_threads(threads_per_rank(hvd))
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in resnet50()]
    tensors = [torch.randn(shape) for shape in resnet50()]
    flat = torch.randn(sum(tensor.numel() for tensor in tensors))
    neighbours = [torch.nn.Parameter(torch.randn(shape)) for shape in resnet50()]
    flatten_parameters(neighbours)
    every_step, in_place = averager(), averager()
    return {
        OURS: lambda: every_step.average_parameters(parameters),
        OURS_FLAT: lambda: in_place.average_parameters(neighbours),
        **mpi_contestants(hvd, flat.clone().numpy()),
        "hvd.grouped_allreduce_": lambda: hvd.grouped_allreduce_(tensors, name="grouped", op=hvd.Average),
        "hvd.allreduce_, one flat tensor": lambda: hvd.allreduce_(flat, name="flat", op=hvd.Average),
    }


def mpi_contestants(hvd: Any, numbers: Any) -> Contestants:
    """What moving the bytes costs without Horovod, if mpi4py is there (``pip install mpi4py``)."""
    if not hvd.mpi_enabled() or importlib.util.find_spec("mpi4py") is None:
        return {}
    mpi = importlib.import_module("mpi4py.MPI")
    return {"MPI_Allreduce in place": lambda: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, numbers)}


def tensorflow_contestants(hvd: Any) -> Contestants:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads_per_rank(hvd))
    variables, others = ([tf.Variable(tf.random.normal(shape)) for shape in resnet50()] for _ in range(2))
    every_step = averager()

    def by_hand() -> None:
        means = hvd.grouped_allreduce([variable.read_value() for variable in others], name="by_hand", op=hvd.Average)
        for variable, mean in zip(others, means, strict=True):
            variable.assign(mean)

    return {
        OURS: lambda: every_step.average_parameters(variables),
        "hvd.grouped_allreduce and assign, in one tf.function": tf.function(by_hand, autograph=False),
    }


def threads_per_rank(hvd: Any) -> int:
    """Ranks that fight for cores would measure that."""
    return max(1, (os.cpu_count() or 1) // int(hvd.local_size()))


def measure(hvd: Any, functions: Contestants, repeats: int, warm_up: int = 3) -> dict[str, list[float]]:
    """Seconds of every call, the functions taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(warm_up + repeats):
        for name, function in functions.items():
            hvd.broadcast_object(0, name="line_up")  # a barrier, which horovod.tensorflow lacks
            started = time.perf_counter()
            function()
            if repeat >= warm_up:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def seconds_without_round(calls: int = 100_000) -> float:
    """Seconds of one ``average_parameters`` call at a step that has no round."""
    idle = PeriodicModelAverager(period=10**9, warmup_steps=10**9)

    class Parameter:
        pass

    parameters = [Parameter() for _ in range(161)]
    return min(timeit.repeat(lambda: idle.average_parameters(parameters), number=calls, repeat=5)) / calls


def report(hvd: Any, framework: str, seconds: dict[str, list[float]], idle: float) -> dict[str, object]:
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    backend = "Open MPI" if hvd.mpi_enabled() else "Gloo"
    table = Table(title=f"One round over ResNet-50's 25.6 M fp32: {framework}, {hvd.size()} ranks, {backend}")
    ours = {"ours": OURS, "flat": OURS_FLAT} if OURS_FLAT in medians else {"ours": OURS}
    for column in ("", "median ms", "best ms", *(f"{short} / this" for short in ours)):
        table.add_column(column, justify="left" if not column else "right")
    for name, median in medians.items():
        ratios = (f"{medians[one] / median:.2f}" for one in ours.values())
        table.add_row(name, f"{1e3 * median:.1f}", f"{1e3 * min(seconds[name]):.1f}", *ratios)
    console = Console(force_terminal=False, highlight=False)  # launchers put tags before every line
    console.print(table)
    console.print(f"A call at a step without a round: {1e6 * idle:.2f} µs.")
    return {
        "framework": framework,
        "ranks": hvd.size(),
        "backend": backend,
        "threads_per_rank": threads_per_rank(hvd),
        "seconds": seconds,
        "median_seconds": medians,
        "to_this": {one: {name: medians[one] / median for name, median in medians.items()} for one in ours.values()},
        "seconds_without_round": idle,
    }


CONTESTANTS = {"torch": torch_contestants, "tensorflow": tensorflow_contestants}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--framework", choices=CONTESTANTS, default="torch", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each contestant (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write every time and ratio to this file")
    arguments = parser.parse_args()
    hvd = importlib.import_module(f"horovod.{arguments.framework}")
    hvd.init()
    seconds = measure(hvd, CONTESTANTS[arguments.framework](hvd), arguments.repeats)
    if hvd.rank() == 0:
        results = report(hvd, arguments.framework, seconds, seconds_without_round())
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
