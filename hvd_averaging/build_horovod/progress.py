"""One line that says how far a build is, rewritten on a terminal; elsewhere a new line now and then."""

from __future__ import annotations

import re
import time
from typing import TextIO

_PERCENT = re.compile(r"^\[ *(\d+)%\]")
_STEP_PERCENT, _STEP_SECONDS = 10, 30.0
# Gloo comes first: more than half of the files, but small ones. After it, the frameworks' headers take the time.
_GLOO_PERCENT, _GLOO_SHARE = 54, 0.4
# Before this share, a guess at the rest would only mislead.
_GUESS_FROM = 0.1


class Progress:
    """Reads the output of CMake's make line by line and shows its percentage, the time used and about the time left."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._started = time.monotonic()
        self._shown_percent, self._shown_at = 0, self._started

    def read(self, line: str) -> None:
        """Take one line of the build's output."""
        found = _PERCENT.match(line)
        if found:
            self._show(int(found[1]))

    def finish(self) -> None:
        """Leave the line, so that what comes next starts on its own."""
        if self._terminal:
            self._stream.write("\r\033[K")
            self._stream.flush()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def _show(self, percent: int) -> None:
        now = time.monotonic()
        due = percent >= self._shown_percent + _STEP_PERCENT or now >= self._shown_at + _STEP_SECONDS
        if not (self._terminal or due):
            return
        self._shown_percent, self._shown_at = percent, now
        text = f"[{percent:3d}%] {clock(self.seconds)} so far{self._left(percent)}"
        self._stream.write(f"\r\033[K{text}" if self._terminal else f"{text}\n")
        self._stream.flush()

    def _left(self, percent: int) -> str:
        done = share_of_time(percent)
        if done < _GUESS_FROM:
            return ""
        return f", about {clock(self.seconds * (1 - done) / done)} left"


def share_of_time(percent: int) -> float:
    """The part of a build's time that has passed when make, which counts files, says `percent`; measured."""
    if percent <= _GLOO_PERCENT:
        return _GLOO_SHARE * percent / _GLOO_PERCENT
    return _GLOO_SHARE + (1 - _GLOO_SHARE) * (percent - _GLOO_PERCENT) / (100 - _GLOO_PERCENT)


def clock(seconds: float) -> str:
    """Minutes and seconds: "3:07"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
