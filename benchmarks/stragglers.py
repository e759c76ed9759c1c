"""What averaging rarely gains where ranks are slow now and then: steps per second, beside what arithmetic expects.

    horovodrun -np 8 --gloo python benchmarks/stragglers.py
    horovodrun -np 8 --mpi python benchmarks/stragglers.py --steps 800

Every step sleeps, and now and then sleeps longer: a rank that stalls. Whoever averages at every step waits at every
step for the slowest rank; whoever averages every H steps waits for the one with most stalls in H steps, which is less,
as stalls even out. All ways to average meet the same stalls. Sleeping takes no core, so eight ranks fit on two.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping

import horovod.torch as hvd
import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from hvd_averaging import HierarchicalModelAverager, ModelAverager, PeriodicModelAverager

Levels = Mapping[int, int]
"""Period to group size, as ``HierarchicalModelAverager`` takes them; each divides the next one."""

PERIODS = (2, 4, 8)
LONGEST = PERIODS[-1]
SHAPES = [(64, 64), (64,)]  # of a model that costs nothing
GRADIENTS = "gradient averaging"
SPINNING = "the same, spinning"  # hvd.grouped_allreduce does not sleep while it waits

Step = Callable[[], object]


def ways(ranks: int) -> dict[str, Levels]:
    """What is compared, each as levels: averaging gradients is a round of all ranks at every step."""
    compared: dict[str, Levels] = {GRADIENTS: {1: ranks}, SPINNING: {1: ranks}}
    compared |= {f"every {period} steps": {period: ranks} for period in PERIODS}
    if ranks > 2 and ranks % 2 == 0:
        pairs = {2: 2, LONGEST: ranks}
        compared[str(pairs)] = pairs
    return compared


def expected_stalls(levels: Levels, probability: float) -> float:
    """Stalls per step that all ranks wait for, on average, if a rank stalls in a step with this probability."""
    chances = np.array([1 - probability, probability])  # of 0, 1, ... stalls; of one rank in one step
    period = size = 1
    for next_period, next_size in levels.items():
        chances = chances_of_maximum(chances_of_sum(chances, next_period // period), next_size // size)
        period, size = next_period, next_size
    return float(chances @ np.arange(len(chances))) / period


def chances_of_sum(chances: NDArray[np.float64], terms: int) -> NDArray[np.float64]:
    """Stretches between rounds follow each other."""
    total = np.ones(1)
    for _ in range(terms):
        total = np.convolve(total, chances)
    return total


def chances_of_maximum(chances: NDArray[np.float64], members: int) -> NDArray[np.float64]:
    """In a round the members wait for the slowest: none has more than k stalls only if each has not."""
    return np.diff(np.cumsum(chances) ** members, prepend=0)


def stalls_waited_for(stalls: NDArray[np.bool_], levels: Levels) -> float:
    """The same for stalls that happened: a row for each rank, a column for each step."""
    waits = stalls.astype(int)
    period = size = 1
    for next_period, next_size in levels.items():
        members, terms = next_size // size, next_period // period
        waits = waits.reshape(len(waits) // members, members, -1, terms).sum(axis=3).max(axis=1)
        period, size = next_period, next_size
    return float(waits.mean()) / period


def draw_stalls(seed: int, rank: int, steps: int, probability: float) -> NDArray[np.bool_]:
    return np.asarray(np.random.default_rng((seed, rank)).random(steps) < probability)


def communication(name: str, levels: Levels) -> Step:
    """What a training loop calls once per step."""
    tensors = [torch.zeros(shape) for shape in SHAPES]
    if name == GRADIENTS:
        return lambda: average_gradients_asleep(tensors)
    if name == SPINNING:
        return lambda: hvd.grouped_allreduce(tensors, name="spinning", op=hvd.Average)
    averager: ModelAverager
    if len(levels) == 1:
        averager = PeriodicModelAverager(period=min(levels), name=name)
    else:
        averager = HierarchicalModelAverager(levels, name=name)
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
    return lambda: averager.average_parameters(parameters)


def average_gradients_asleep(tensors: list[torch.Tensor]) -> None:
    """As averagers wait, so that what is compared is how long ranks wait, not how."""
    handle = hvd.grouped_allreduce_async(tensors, name="gradients", op=hvd.Average)
    while not hvd.poll(handle):
        time.sleep(0.5e-3)
    hvd.synchronize(handle)


def measure(steps: Mapping[str, Step], sleeps: list[float]) -> dict[str, float]:
    """Milliseconds per step of each way. They take turns, block by block, so that a noisy machine is so for all."""
    for communicate in steps.values():
        run(communicate, [0.0] * (LONGEST + 1))  # a round of all ranks is at step 0, and then ends every block
    milliseconds = dict.fromkeys(steps, 0.0)
    for start in range(0, len(sleeps), LONGEST):
        for name, communicate in steps.items():
            milliseconds[name] += run(communicate, sleeps[start : start + LONGEST]) / len(sleeps)
    return milliseconds


def run(communicate: Step, sleeps: list[float]) -> float:
    started = time.perf_counter()
    for milliseconds in sleeps:
        time.sleep(milliseconds / 1e3)
        communicate()
    return 1e3 * (time.perf_counter() - started)


def gains(milliseconds: Mapping[str, float]) -> dict[str, str]:
    return {name: f"{milliseconds[GRADIENTS] / each:.2f}" for name, each in milliseconds.items()}


def report(measured: dict[str, float], drawn: dict[str, float], expected: dict[str, float], title: str) -> Table:
    """All in milliseconds per step."""
    caption = (
        "On the right: steps/s, divided by those of gradient averaging. Drawn: as if this run's sleeps were all that "
        "takes time. Expected: the same for a run without end. Overhead: ms per step beyond those sleeps. Spinning: "
        "hvd.grouped_allreduce by itself, which keeps a core busy while it waits; the others sleep."
    )
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), caption=caption)
    table.title_justify = table.caption_justify = "left"
    table.add_column(no_wrap=True)
    for heading in ("steps/s", "overhead", "measured", "drawn", "expected"):
        table.add_column(heading, justify="right")
    columns = [gains(milliseconds) for milliseconds in (measured, drawn, expected)]
    for name, each in measured.items():
        row = (f"{1e3 / each:.1f}", f"{each - drawn[name]:.1f}", *(column[name] for column in columns))
        table.add_row(name, *row)
    return table


def main() -> None:
    arguments = parse()
    hvd.init(process_sets="dynamic")  # the hierarchy adds its pairs
    torch.set_num_threads(1)
    steps, step_ms, stall_ms = arguments.steps, arguments.step_ms, arguments.stall_ms
    probability = arguments.probability
    stalls = np.array([draw_stalls(arguments.seed, rank, steps, probability) for rank in range(hvd.size())])
    sleeps = (step_ms + stall_ms * stalls[hvd.rank()]).tolist()
    compared = ways(hvd.size())
    measured = measure({name: communication(name, levels) for name, levels in compared.items()}, sleeps)
    drawn = {name: step_ms + stall_ms * stalls_waited_for(stalls, levels) for name, levels in compared.items()}
    expected = {name: step_ms + stall_ms * expected_stalls(levels, probability) for name, levels in compared.items()}
    if hvd.rank() == 0:
        backend = "Open MPI" if hvd.mpi_enabled() else "Gloo"
        title = (
            f"{hvd.size()} ranks over {backend}, {steps} steps of {step_ms:g} ms, each with probability "
            f"{probability:g} of another {stall_ms:g} ms"
        )
        console = Console(force_terminal=False, highlight=False, width=80 - len("[1,0]<stdout>:"))  # a launcher's tag
        console.print("", report(measured, drawn, expected, title), sep="\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    option = parser.add_argument
    option("--steps", type=int, default=200, help=f"timed ones of each way, whole {LONGEST}s (default: %(default)s)")
    option("--step-ms", type=float, default=5.0, help="what every step sleeps (default: %(default)s)")
    option("--stall-ms", type=float, default=50.0, help="what a stall adds to that (default: %(default)s)")
    option("--probability", type=float, default=1 / 8, help="of a stall in a step (default: %(default)s)")
    option("--seed", type=int, default=0, help="of the stalls; every rank draws its own (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.steps % LONGEST:
        parser.error(f"--steps {arguments.steps} is not a multiple of {LONGEST}, which a run of whole blocks needs")
    if arguments.step_ms <= 0 or arguments.stall_ms < 0 or not 0 <= arguments.probability <= 1:
        parser.error("a step takes time, a stall no negative one, and a probability is from 0 to 1")
    return arguments


if __name__ == "__main__":
    main()
