"""The command line that the demos share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def parse(description: str, warmup_steps: int = 0) -> argparse.Namespace:
    """``period``, ``warmup_steps``, ``epochs`` and ``seed`` (whole numbers), and ``output`` (a path)."""
    parser = Parser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    option = parser.add_argument
    option("--period", type=at_least(1), default=8, metavar="H", help="steps from one averaging round to the next")
    option("--warmup-steps", type=at_least(0), default=warmup_steps, metavar="N", help="steps before the first round")
    option("--epochs", type=at_least(1), default=30, metavar="N", help="passes of every rank over its shard")
    option("--seed", type=at_least(0), default=0, metavar="N", help="of the initial weights and the order of batches")
    option("--output", type=folder, default="output", metavar="DIR", help="where the picture goes")
    return parser.parse_args()


class Parser(argparse.ArgumentParser):
    """Its errors are one line: every rank says them."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help shows all options)\n")


def folder(text: str) -> Path:
    """Make sure that there is one: better now than after the training."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot make the folder {text!r}: {error.strerror}") from None
    return path


def at_least(least: int) -> Callable[[str], int]:
    """A reader of whole numbers that are not below ``least``."""

    def number(text: str) -> int:
        if not re.fullmatch("[0-9]+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return number
