"""The same training several ways: what each costs and achieves, live, and as a table and a picture at the end.

Knows no framework. Every rank keeps the score; the leading one shows it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import picture
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

# A score is taken at a round, but not more often than this many steps.
STEPS_BETWEEN_SCORES = 16

# How often a log hears of each way, where no bar can move.
LINES_PER_WAY = 4


class Way:
    """One way to train.

    Attributes:
        ranks: how many ranks train.
        rounds: how often they averaged.
        megabytes: what every rank sent for that, if by a ring: 2 (n - 1) / n of each payload. Where ranks share nodes,
            this is of the rounds over several nodes only.
        megabytes_within: the same of the rounds within a node.
        seconds: from the first step to the final model.
        curve: ``(megabytes, accuracy)`` at some of the rounds, and at last of the final model.
    """

    def __init__(
        self, name: str, ranks: int, node: int, accuracy: Callable[[], float], show: Callable[[Way], None]
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.steps = self.rounds = 0
        self.megabytes = self.megabytes_within = self.seconds = 0.0
        self.curve: list[tuple[float, float]] = []
        self._node = node
        self._accuracy = accuracy
        self._show = show
        self._scored_at = 0

    def step(self, averaged_bytes: int = 0, ranks: int | None = None) -> None:
        """Count an optimizer step, and the round of ``ranks`` (``None``: all) that came with it if there was one."""
        self.steps += 1
        self.round(averaged_bytes, ranks)
        # Between rounds every rank has a model of its own, none of which is what this way would hand out.
        of_all = self.ranks == 1 or (averaged_bytes > 0 and ranks in (None, self.ranks))
        if of_all and self.steps >= self._scored_at + STEPS_BETWEEN_SCORES:
            self.score()
        self._show(self)

    def round(self, averaged_bytes: int, ranks: int | None = None) -> None:
        """Count a round of ``ranks`` (``None``: all), unless nothing was averaged."""
        ranks = ranks or self.ranks
        sent = averaged_bytes * 2 * (ranks - 1) / ranks / 1e6
        self.rounds += averaged_bytes > 0
        if ranks > self._node:
            self.megabytes += sent
        else:
            self.megabytes_within += sent

    def score(self) -> None:
        self._scored_at = self.steps
        self.curve.append((self.megabytes, self._accuracy()))

    @property
    def accuracy(self) -> float | None:
        """Of the latest model that was scored, as a fraction."""
        return self.curve[-1][1] if self.curve else None


class Contest:
    """What is shown of several ways to train, by the leading rank only.

    Args:
        steps: of every way.
        rank: this one; the first one shows.
        ranks: how many there are.
        node: how many neighbouring ranks share a node; with more than one, what goes between nodes is told apart.
    """

    def __init__(self, steps: int, rank: int, ranks: int, node: int = 1) -> None:
        self.ways: list[Way] = []
        self._steps = steps
        self._leads = rank == 0
        self._ranks = ranks
        self._node = node
        self._console = open_console() if self._leads else Console(quiet=True)
        if ranks == 1:
            self._say(f"Only one rank, so nothing is averaged. Launch four: horovodrun -np 4 python {sys.argv[0]}")

    @contextmanager
    def way(self, name: str, ranks: int, accuracy: Callable[[], float]) -> Iterator[Way]:
        """Time and show one way to train; the model as it is at the end of the block is the final one.

        Args:
            ranks: how many train.
            accuracy: of the present model on the test set, as a fraction. Called on the leading rank only.
        """
        with self._display(name) as show:
            way = Way(name, ranks, self._node, accuracy if self._leads else lambda: 0.0, show)
            started = time.perf_counter()
            yield way
            way.seconds = time.perf_counter() - started
            way.score()
            show(way)
        self.ways.append(way)

    @contextmanager
    def _display(self, name: str) -> Iterator[Callable[[Way], None]]:
        """A bar where one can move; else, in a log, a line now and then."""
        columns = (
            TextColumn(f"{name:<19}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("steps  {task.fields[score]:>6}"),
        )
        live = self._console.is_terminal
        with Progress(*columns, console=self._console, expand=True, disable=not live) as progress:
            task = progress.add_task(name, total=self._steps, score="")
            shown = 0

            def show(way: Way) -> None:
                nonlocal shown
                score = "" if way.accuracy is None else f"{way.accuracy:.1%}"
                progress.update(task, completed=way.steps, score=score)
                part = way.steps * LINES_PER_WAY // self._steps
                if not live and part > shown and (part < LINES_PER_WAY or way.seconds):
                    shown = part
                    self._console.print(f"{name:<19} {way.steps:>5}/{self._steps} steps  {score:>6}", highlight=False)

            yield show

    def show_results(self, folder: Path) -> None:
        """A table, and in ``folder`` a picture that is called as the script is, if any rank sent anything."""
        self._console.print("", self._table(), "", sep="\n")
        if self._leads and self._ranks > 1:
            title = f"The same {self._steps} steps on {self._ranks} ranks"
            sender = "each rank" if self._node == 1 else f"each node of {self._node} ranks to the other"
            path = folder / Path(sys.argv[0]).with_suffix(".png").name
            self._say(f"Picture: {picture.draw(self.ways, title, sender, path)}")

    def _table(self) -> Table:
        nodes = self._node > 1
        caption = "MB sent by each rank: 2 (n - 1) / n times what is averaged, as n ranks in a ring send it."
        if nodes:
            caption += " A ring over all ranks leaves each node once, so this is also what a node sends to the next."
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), caption=caption)
        table.caption_justify = "left"
        sent = ("MB between nodes", "MB within nodes") if nodes else ("MB sent",)
        table.add_column(no_wrap=True)
        for heading in ("test accuracy", "rounds", *sent, "seconds"):
            table.add_column(heading, justify="right")
        for way in self.ways:
            megabytes = (way.megabytes, way.megabytes_within)[: len(sent)]
            row = (f"{way.accuracy:.1%}", str(way.rounds), *(f"{each:.2f}" for each in megabytes), f"{way.seconds:.1f}")
            table.add_row(way.name, *row)
        return table

    def _say(self, line: str) -> None:
        """Print it in one piece, however long, so that it can be copied."""
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)


def open_console() -> Console:
    """The terminal that ``scripts/demo`` names, else standard output, taken for a log.

    A launcher hides the terminal from its ranks, or shows them one that is none (Open MPI), and puts something like
    ``[1,0]<stdout>:`` in front of their lines.
    """
    terminal = os.environ.get("DEMO_TERMINAL")
    if not terminal:
        return Console(force_terminal=False, width=80 - len("[1,0]<stdout>:"))
    stream = Path(terminal).open("w")  # noqa: SIM115 - it is the console's for the life of the process
    return Console(file=stream, force_terminal=True, width=os.get_terminal_size(stream.fileno()).columns)
