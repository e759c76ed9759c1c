"""What users notice: samples per second, and seconds until a test accuracy, for several ways to train on several hosts.

    horovodrun --gloo -np 2 -H one:1,two:1 python benchmarks/end_to_end.py
    python benchmarks/two_hosts.py --link 1gbit benchmarks/end_to_end.py --link 1gbit     # two hosts on one machine

A small network learns scikit-learn's handwritten digits. Beside it ResNet-50's parameters take part in everything, the
optimizer included, so that as much travels and is updated as for ResNet-50, but next to nothing is computed. The ways
take turns, each until it has reached the accuracy and has had its turns, or until its time is over.
"""

# mypy: allow-untyped-calls
# (Tensor.backward has no type hints.)

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import shapes
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hvd_averaging import PeriodicModelAverager, broadcast_parameters

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import digits

BATCH_SIZE = 16  # of every rank
GRADIENTS = "hvd.DistributedOptimizer"
FEWEST_STEPS = 8  # of a turn: averaging gradients has no period of its own

WAYS: dict[str, dict[str, Any] | None] = {
    GRADIENTS: None,
    "period 8": {"period": 8},
    "period 32": {"period": 32},
    "period 32, delay 16": {"period": 32, "delay": 16},
    "period 8, int8": {"period": 8, "wire": "int8"},
    "period 32, int8": {"period": 32, "wire": "int8"},
}
"""Name to the averager's options; none: gradients are averaged at every step."""


class Ballast(torch.autograd.Function):
    """Hands a loss on and gives parameters a gradient without computing one."""

    @staticmethod
    def forward(context: Any, loss: Tensor, gradients: list[Tensor], *_parameters: Tensor) -> Tensor:
        context.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (gradient, None, *context.gradients)


class Model(nn.Module):
    """A network for digits, and parameters that do nothing but travel."""

    def __init__(self, ballast: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.network = nn.Sequential(nn.Linear(digits.PIXELS, 256), nn.ReLU(), nn.Linear(256, digits.CLASSES))
        self.ballast = nn.ParameterList(torch.randn(shape) for shape in shapes.named(ballast))
        noise = torch.Generator().manual_seed(seed + 1 + hvd.rank())
        self._gradients = [1e-3 * torch.randn(weight.shape, generator=noise) for weight in self.ballast]

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        loss = cross_entropy(self.network(images), labels)
        return Ballast.apply(loss, self._gradients, *self.ballast)  # type: ignore[no-any-return]


class Way:
    """One way to train, its model, and how it did.

    Attributes:
        turns: seconds of every turn of ``steps`` steps, the last of which averages.
        curve: ``(seconds, accuracy)`` at the end of every turn.
    """

    def __init__(self, name: str, train: digits.Digits, ballast: str, seed: int) -> None:
        self.options = WAYS[name]
        self.model = Model(ballast, seed)
        self.batches = endless(train, seed)
        optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        broadcast_parameters(self.model)
        self.steps = FEWEST_STEPS
        if self.options is None:
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=self.model.named_parameters())
        else:
            self.averager = averager(name, **self.options)
            self.steps = max(self.steps, self.averager.period)
        self.optimizer = optimizer
        self.turns: list[float] = []
        self.curve: list[tuple[float, float]] = []

    def turn(self) -> None:
        """Steps until the next round has ended, timed."""
        hvd.barrier()
        started = time.perf_counter()
        for images, labels in itertools.islice(self.batches, self.steps):
            self.optimizer.zero_grad()
            self.model.loss(images, labels).backward()
            self.optimizer.step()
            if self.options is not None:
                self.averager.average_parameters(self.model)
        self.turns.append(time.perf_counter() - started)

    def score(self, test: digits.Digits) -> None:
        """Of the mean of the replicas, which differ at the end of a turn only if rounds are delayed. Not timed."""
        network = self.model.network
        with torch.no_grad():
            means = {
                name: hvd.allreduce(weight, name=f"score.{name}", op=hvd.Average)
                for name, weight in network.named_parameters()
            }
            guesses = torch.func.functional_call(network, means, torch.from_numpy(test.images)).argmax(dim=1)
        accuracy = float((guesses == torch.from_numpy(test.labels)).float().mean())
        self.curve.append((sum(self.turns), accuracy))

    def seconds_to(self, accuracy: float) -> float | None:
        return next((seconds for seconds, reached in self.curve if reached >= accuracy), None)

    def samples_per_second(self) -> list[float]:
        """Of all ranks together, turn by turn; the first turn, which makes buffers, is left out if others follow."""
        return [self.steps * BATCH_SIZE * hvd.size() / seconds for seconds in self.turns[1:] or self.turns]


def averager(name: str, period: int, **options: Any) -> PeriodicModelAverager:
    """Whose rounds end with a turn: a delayed one sets off earlier, since others have the next turn."""
    return PeriodicModelAverager(period, warmup_steps=period - 1 - options.get("delay", 0), name=name, **options)


def endless(train: digits.Digits, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    shard = train.shard(hvd.rank(), hvd.size())
    for images, labels in shard.batches(BATCH_SIZE, sys.maxsize, seed * hvd.size() + hvd.rank()):
        yield torch.from_numpy(images), torch.from_numpy(labels)


def contest(names: list[str], ballast: str, accuracy: float, turns: int, limit_s: float, seed: int) -> dict[str, Way]:
    """Turn by turn, until all have reached the accuracy in at least so many turns, or used up their time."""
    train, test = digits.load()
    ways = {name: Way(name, train, ballast, seed) for name in names}
    going = list(ways.values())
    while going:
        for way in going:
            way.turn()
            way.score(test)
        going = [way for way in going if agreed(unfinished(way, accuracy, turns, limit_s))]
    return ways


def unfinished(way: Way, accuracy: float, turns: int, limit_s: float) -> bool:
    """The limit does not cut the first two turns, of which only the second tells the speed."""
    if len(way.turns) < 2:
        return True
    return sum(way.turns) < limit_s and (len(way.turns) < turns or way.seconds_to(accuracy) is None)


def agreed(decision: bool) -> bool:
    """What the first rank has decided: clocks differ."""
    return bool(hvd.broadcast_object(decision, name="agreed"))


def result(ways: dict[str, Way], arguments: argparse.Namespace) -> dict[str, Any]:
    turns = {name: way.samples_per_second() for name, way in ways.items()}
    speeds = {name: statistics.median(each) for name, each in turns.items()}
    baseline = speeds.get(GRADIENTS)
    return {
        "ratios": {name: round(speed / baseline, 3) for name, speed in speeds.items()} if baseline else {},
        "kind": "end to end",
        "link": arguments.link,
        "ranks": hvd.size(),
        "backend": "Open MPI" if hvd.mpi_enabled() else "Gloo",
        "ballast": arguments.ballast,
        "accuracy": arguments.accuracy,
        "limit_s": arguments.seconds,
        "median_samples_per_second": {name: round(speed, 2) for name, speed in speeds.items()},
        "samples_per_second": {
            name: [round(each, 2) for each in way.samples_per_second()] for name, way in ways.items()
        },
        "seconds_to_accuracy": {name: way.seconds_to(arguments.accuracy) for name, way in ways.items()},
        "curves": {name: [(round(at, 3), round(score, 4)) for at, score in way.curve] for name, way in ways.items()},
    }


def table(result: dict[str, Any]) -> Table:
    title = f"End to end: digits and {result['ballast']}'s traffic, {result['ranks']} ranks, {result['backend']}"
    title += f", {result['link']}" if result["link"] else ""
    caption = "Lowest and highest turn in brackets. Gain: samples per second, divided by those of averaging gradients."
    shown = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    shown.title_justify = shown.caption_justify = "left"
    shown.add_column(no_wrap=True)
    for heading in ("gain", "samples/s", "", f"s to {result['accuracy']:.0%}"):
        shown.add_column(heading, justify="right")
    for name, speeds in result["samples_per_second"].items():
        gain = f"{result['ratios'][name]:.2f}" if result["ratios"] else ""
        seconds = result["seconds_to_accuracy"][name]
        reached = f"> {result['curves'][name][-1][0]:.0f}" if seconds is None else f"{seconds:.1f}"
        spread = f"({min(speeds):.4g} to {max(speeds):.4g})"
        shown.add_row(name, gain, f"{statistics.median(speeds):.4g}", spread, reached)
    return shown


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    option = parser.add_argument
    option("--only", nargs="+", metavar="WAY", choices=WAYS, default=list(WAYS), help=f"of: {'; '.join(WAYS)}")
    option("--ballast", default="resnet50", help="shapes that travel along: a model or like 300x10MB (%(default)s)")
    option("--accuracy", type=float, default=0.93, help="on the test set, to be reached (default: %(default)s)")
    option("--turns", type=int, default=6, help="of each way, at least (default: %(default)s)")
    option("--seconds", type=float, default=300, help="of each way, at most, but two turns (default: %(default)s)")
    option("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    option("--link", default="", help="what lies between the ranks, for the title and the JSON")
    option("--json", type=Path, help="also write all numbers to this file")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    hvd.init()
    torch.set_num_threads(1)
    ways = contest(
        arguments.only, arguments.ballast, arguments.accuracy, arguments.turns, arguments.seconds, arguments.seed
    )
    if hvd.rank() == 0:
        done = result(ways, arguments)
        Console(force_terminal=False, highlight=False, width=100).print("", table(done), sep="\n")
        if arguments.json:
            arguments.json.write_text(json.dumps([done]))


if __name__ == "__main__":
    main()
