"""How much of a round disappears behind the training, if it is delayed: ``PeriodicModelAverager(..., delay=1)``.

    horovodrun -np 2 --mpi python benchmarks/overlap.py
    horovodrun -np 2 --mpi python benchmarks/overlap.py --compute
    sudo .venv/bin/python benchmarks/two_hosts.py --link 1gbit benchmarks/overlap.py --step-ms 1200

Every step sleeps, which leaves a core to each rank's communication, or with ``--compute`` multiplies matrices for about
as long. What a round costs the training loop is the time of a period beyond that of as many steps without averaging.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import horovod.torch as hvd
import torch
from rich.console import Console
from rich.table import Table
from shapes import resnet50

from hvd_averaging import ModelAverager, PeriodicModelAverager

PERIOD = 4
NEVER = PeriodicModelAverager(period=10**9, warmup_steps=10**9)

Step = Callable[[], object]


def ways() -> dict[str, ModelAverager]:
    return {
        "no averaging": NEVER,
        "a round at once": PeriodicModelAverager(PERIOD, name="at once"),
        "a step later, delay=1": PeriodicModelAverager(PERIOD, delay=1, name="delayed"),
        "the same, 4 fragments": PeriodicModelAverager(PERIOD, delay=1, fragments=PERIOD, name="fragments"),
    }


def sleeping(seconds: float) -> Step:
    return lambda: time.sleep(seconds)


def computing(seconds: float) -> Step:
    """Multiplications that take about so long when nothing else runs."""
    matrix = torch.randn(512, 512)
    started = time.perf_counter()
    for _ in range(20):
        matrix @ matrix
    times = max(1, round(20 * seconds / (time.perf_counter() - started)))

    def step() -> None:
        for _ in range(times):
            matrix @ matrix

    return step


def measure(step: Step, periods: int) -> dict[str, list[float]]:
    """Seconds of every period, the ways taking turns."""
    compared = ways()
    parameters = {name: [torch.nn.Parameter(torch.randn(shape)) for shape in resnet50()] for name in compared}
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    for period in range(-1, periods):
        for name, averager in compared.items():
            hvd.barrier()
            started = time.perf_counter()
            for _ in range(PERIOD):
                step()
                averager.average_parameters(parameters[name])
            if period >= 0:  # the first one makes the buffers
                seconds[name].append(time.perf_counter() - started)
    for averager in compared.values():
        averager.flush()  # or the last round of a rank would begin when the other one has ended
    return seconds


def report(seconds: dict[str, list[float]], title: str) -> Table:
    table = Table(title=title)
    for column in ("", "ms per period", "ms of averaging", "hidden"):
        table.add_column(column, justify="left" if not column else "right")
    medians = {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
    nothing, at_once = medians["no averaging"], medians["a round at once"]
    for name, median in medians.items():
        hidden = "" if name == "no averaging" else f"{1 - (median - nothing) / (at_once - nothing):.0%}"
        table.add_row(name, f"{median:.1f}", f"{median - nothing:.1f}", hidden)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--step-ms", type=float, default=200.0, help="of every step (default: %(default)s)")
    parser.add_argument("--periods", type=int, default=10, help=f"of {PERIOD} steps each (default: %(default)s)")
    parser.add_argument("--compute", action="store_true", help="multiply matrices instead of sleeping")
    arguments = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    step = (computing if arguments.compute else sleeping)(arguments.step_ms / 1e3)
    seconds = measure(step, arguments.periods)
    if hvd.rank() == 0:
        backend = "Open MPI" if hvd.mpi_enabled() else "Gloo"
        how = "computing" if arguments.compute else "sleeping"
        title = f"ResNet-50's parameters, {hvd.size()} ranks, {backend}, steps of {arguments.step_ms:g} ms {how}"
        Console(force_terminal=False, highlight=False, width=80 - len("[1,0]<stdout>:")).print(report(seconds, title))


if __name__ == "__main__":
    main()
