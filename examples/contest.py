"""The same training several ways: what each costs and achieves, live while it runs and as a table at the end.

Knows no framework. Every rank keeps the score; the leading one shows it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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
        megabytes: what every rank sent for that, if by a ring: 2 (n - 1) / n of each payload.
        seconds: from the first step to the final model.
        curve: ``(megabytes, accuracy)`` at some of the rounds, and at last of the final model.
    """

    def __init__(self, name: str, ranks: int, accuracy: Callable[[], float], show: Callable[[Way], None]) -> None:
        self.name = name
        self.ranks = ranks
        self.steps = self.rounds = 0
        self.megabytes = self.seconds = 0.0
        self.curve: list[tuple[float, float]] = []
        self._accuracy = accuracy
        self._show = show
        self._scored_at = 0

    def step(self, averaged_bytes: int = 0) -> None:
        """Count an optimizer step, and the round that came with it if anything was averaged."""
        self.steps += 1
        self.round(averaged_bytes)
        # Between rounds every rank has a model of its own, none of which is what this way would hand out.
        of_all = averaged_bytes > 0 or self.ranks == 1
        if of_all and self.steps >= self._scored_at + STEPS_BETWEEN_SCORES:
            self.score()
        self._show(self)

    def round(self, averaged_bytes: int) -> None:
        """Count a round, unless nothing was averaged."""
        self.rounds += averaged_bytes > 0
        self.megabytes += averaged_bytes * 2 * (self.ranks - 1) / self.ranks / 1e6

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
        leads: whether this rank is the one that shows.
    """

    def __init__(self, steps: int, leads: bool) -> None:
        self.console = open_console() if leads else Console(quiet=True)
        self.ways: list[Way] = []
        self._steps = steps
        self._leads = leads

    @contextmanager
    def way(self, name: str, ranks: int, accuracy: Callable[[], float]) -> Iterator[Way]:
        """Time and show one way to train; the model as it is at the end of the block is the final one.

        Args:
            ranks: how many train.
            accuracy: of the present model on the test set, as a fraction. Called on the leading rank only.
        """
        with self._display(name) as show:
            way = Way(name, ranks, accuracy if self._leads else lambda: 0.0, show)
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
        live = self.console.is_terminal
        with Progress(*columns, console=self.console, expand=True, disable=not live) as progress:
            task = progress.add_task(name, total=self._steps, score="")
            shown = 0

            def show(way: Way) -> None:
                nonlocal shown
                score = "" if way.accuracy is None else f"{way.accuracy:.1%}"
                progress.update(task, completed=way.steps, score=score)
                part = way.steps * LINES_PER_WAY // self._steps
                if not live and part > shown and (part < LINES_PER_WAY or way.seconds):
                    shown = part
                    self.console.print(f"{name:<19} {way.steps:>5}/{self._steps} steps  {score:>6}", highlight=False)

            yield show

    def say(self, line: str) -> None:
        """Print it in one piece, however long, so that it can be copied."""
        self.console.print(line, soft_wrap=True, highlight=False, markup=False)

    def print_table(self) -> None:
        caption = "MB sent by each rank: 2 (n - 1) / n times what is averaged, as n ranks in a ring send it."
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, caption=caption, caption_justify="left")
        for heading in ("", "test accuracy", "rounds", "MB sent", "seconds"):
            table.add_column(heading, justify="right" if heading else "left")
        for way in self.ways:
            row = (f"{way.accuracy:.1%}", str(way.rounds), f"{way.megabytes:.2f}", f"{way.seconds:.1f}")
            table.add_row(way.name, *row)
        self.console.print("", table, "", sep="\n")


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
