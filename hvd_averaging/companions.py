"""What is averaged along with the parameters, by a rule of its own: a model's buffers, counters, an optimizer's state.

A plain mean would be wrong for some of these: variances of replicas with different means, counters, or what has no
mean. How they travel is in ``cargo``. Plain data: nothing here knows a framework.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BUFFERS = ("local", "average", "broadcast")
"""What an averager may do with a model's buffers; see :class:`hvd_averaging.ModelAverager`."""


def check_buffers(buffers: str) -> None:
    """Raise ``ValueError`` unless ``buffers`` is one of ``BUFFERS``."""
    if buffers not in BUFFERS:
        raise ValueError(f"buffers is one of {', '.join(map(repr, BUFFERS))}; not {buffers!r}.")


class Rule(enum.Enum):
    """What a round makes of a companion."""

    MEAN = "the mean"
    VARIANCE = "the variance of all replicas' data together"
    MAXIMUM = "the maximum"
    COPY = "what the first rank holds"
    KEEP = "what it was"


@dataclass(frozen=True)
class Companion:
    """A tensor and its rule; ``center`` is the mean that a ``VARIANCE`` is about, and is averaged with it."""

    name: str
    tensor: Any
    rule: Rule
    center: Companion | None = None


@dataclass(frozen=True)
class Together:
    """Parameters and companions, put together by a front that knows what belongs to what.

    ``model`` is whose buffers are averaged, if ``params`` is no model itself.
    """

    params: object
    companions: Sequence[Companion] = ()
    model: object = None


def copies(companions: Sequence[Companion]) -> list[Companion]:
    """The same tensors, each to be copied from the first rank."""
    tensors = [single for companion in companions for single in (companion.center, companion) if single is not None]
    return [Companion(single.name, single.tensor, Rule.COPY) for single in tensors]
