"""The few numbers that travel with every round, inside the collective that carries the parameters.

They are summed over the ranks along with everything else, so all ranks read the same sums and come to the same
verdict: how many ranks took part (a rank in ``hvd.join()`` adds zeros), and whether all agree about the step and the
layout. Nothing here knows how the numbers travel.

Whether a value is the same on n ranks can be told from sums alone: it is when ``n * sum(v * v) == sum(v) ** 2``
(equality in the Cauchy-Schwarz inequality). Values go as hexadecimal digits, so that the sums stay small integers
that are exact in float32 for up to some 9,000 ranks, however the mean was rounded.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_DIGITS = 8
_MODULUS = 16**_DIGITS


class Presence(enum.Enum):
    """Why a rank is in a round."""

    AVERAGING = "averages"
    JOINING = "has no more batches"
    LEAVING = "leaves"


@dataclass(frozen=True)
class Header:
    """What one rank says in a round.

    ``agreement`` is the hash of all that was agreed beforehand; ``able`` is false when this rank cannot average over
    the agreed layout (its parameters changed, or could not be collected).
    """

    step: int
    agreement: int
    presence: Presence = Presence.AVERAGING
    contributes: bool = True
    able: bool = True

    def encode(self) -> list[float]:
        """The header as numbers that may be summed over ranks."""
        steps = [0] * _DIGITS if self.presence is Presence.JOINING else _digits(self.step)
        values = [*steps, *_digits(self.agreement)]
        flags = [
            True,
            self.contributes,
            self.presence is Presence.JOINING,
            self.presence is Presence.LEAVING,
            not self.able,
        ]
        return [*map(float, flags), *map(float, values), *(float(value * value) for value in values)]


LENGTH = 5 + 4 * _DIGITS
"""How many elements a header takes at the tail of a buffer."""


@dataclass(frozen=True)
class Tally:
    """What all headers of a round say together; equal on all ranks.

    ``present`` ranks took part in the collective, ``contributors`` of them brought parameters.
    """

    present: int
    contributors: int
    joining: int
    leaving: int
    unable: int
    same_step: bool
    same_agreement: bool

    @classmethod
    def decode(cls, sums: Sequence[float]) -> Tally:
        """Read the sum over all ranks of :meth:`Header.encode`."""
        numbers = iter([round(value) for value in sums])
        present, contributors, joining, leaving, unable = (next(numbers) for _ in range(5))
        sums_of_digits, sums_of_squares = _take(numbers, 2 * _DIGITS), _take(numbers, 2 * _DIGITS)
        counting = present - joining  # a rank that has run out of batches may be at any step

        def same(ranks: int, part: slice) -> bool:
            pairs = zip(sums_of_digits[part], sums_of_squares[part], strict=True)
            return all(ranks * squares == total * total for total, squares in pairs)

        return cls(
            present,
            contributors,
            joining,
            leaving,
            unable,
            same_step=same(counting, slice(0, _DIGITS)),
            same_agreement=same(present, slice(_DIGITS, 2 * _DIGITS)),
        )

    @property
    def sound(self) -> bool:
        """Whether the mean of this round may be used."""
        return not (self.unable or self.leaving) and self.same_step and self.same_agreement


def _digits(value: int) -> list[int]:
    value %= _MODULUS
    return [(value >> (4 * place)) & 15 for place in range(_DIGITS)]


def _take(numbers: Iterator[int], count: int) -> list[int]:
    return [next(numbers) for _ in range(count)]
