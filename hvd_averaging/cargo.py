"""How companions travel: each in a float64 array of its own, in the same collective as the parameters.

So a round changes all or nothing, whichever ranks take part. Adapters turn tensors into NumPy arrays and back. Loaded
when there are companions: nothing else here needs NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .adapters import Adapter
from .companions import Companion, Rule
from .members import Members

Array = NDArray[Any]
Wide = NDArray[np.float64]


class Cargo:
    """The arrays that companions travel in, on one process set; the same ones in every round."""

    def __init__(self, adapter: Adapter, members: Members) -> None:
        self._adapter, self._members = adapter, members
        self._carriers: dict[str, Any] = {}

    def load(self, companions: Sequence[Companion]) -> list[tuple[str, Any]]:
        """The named tensors to average: tensors of the framework that hold this rank's values."""
        before, self._carriers = self._carriers, {}
        plain = [(companion.name, companion.tensor) for companion in companions if companion.rule is Rule.MEAN]
        for companion in companions:
            if companion.rule in _PACK:
                wide = _PACK[companion.rule](self, companion)
                carrier = before.get(companion.name)
                if carrier is None or tuple(carrier.shape) != wide.shape:
                    carrier = self._adapter.carrier(wide)
                else:
                    self._adapter.assign(carrier, wide)
                self._carriers[companion.name] = carrier
        return [*plain, *self._carriers.items()]

    def unload(self, companions: Sequence[Companion], contributors: int) -> None:
        """Give the companions what the arrays, averaged over ``contributors`` ranks, say."""
        for companion in companions:
            if companion.rule in _UNPACK:
                mean = self._adapter.numpy(self._carriers[companion.name])
                _UNPACK[companion.rule](self, companion, mean, contributors)

    def _pack_variance(self, companion: Companion) -> Wide:
        """Mean and second moment, whose means give the variance by the law of total variance."""
        assert companion.center is not None, "a variance is about a mean"
        mean = self._value(companion.center).astype(np.float64)
        return np.stack([mean, self._value(companion) + mean**2])

    def _unpack_variance(self, companion: Companion, mean: Wide, contributors: int) -> None:
        assert companion.center is not None, "a variance is about a mean"
        self._adapter.assign(companion.center.tensor, mean[0])
        self._adapter.assign(companion.tensor, np.maximum(mean[1] - mean[0] ** 2, 0))

    def _pack_maximum(self, companion: Companion) -> Wide:
        """Every rank has a row of its own in the sum, which a rank in hvd.join() leaves at zero."""
        value = self._value(companion)
        rows = np.zeros((self._members.size, *value.shape))
        rows[self._members.position] = value
        return rows

    def _unpack_maximum(self, companion: Companion, mean: Wide, contributors: int) -> None:
        values = (mean * contributors).max(axis=0)
        whole = np.rint(values)  # what a step count was; but NAdam, say, has numbers between 0 and 1
        self._adapter.assign(companion.tensor, np.where(np.isclose(values, whole, rtol=1e-12, atol=0), whole, values))

    def _pack_copy(self, companion: Companion) -> Wide:
        """The first rank's numbers and a 1, the others' zeros: what those hold may be infinite."""
        numbers = _as_numbers(self._value(companion))
        return np.append(numbers, 1) if self._members.position == 0 else np.zeros(len(numbers) + 1)

    def _unpack_copy(self, companion: Companion, mean: Wide, contributors: int) -> None:
        numbers = mean * contributors
        if round(numbers[-1]) == 1:  # the first rank may be in hvd.join(): then every rank keeps what it has
            self._adapter.assign(companion.tensor, _from_numbers(numbers[:-1], self._value(companion)))

    def _value(self, companion: Companion) -> Array:
        return self._adapter.numpy(companion.tensor)


_PACK: dict[Rule, Callable[[Cargo, Companion], Wide]] = {
    Rule.VARIANCE: Cargo._pack_variance,
    Rule.MAXIMUM: Cargo._pack_maximum,
    Rule.COPY: Cargo._pack_copy,
}
_UNPACK: dict[Rule, Callable[[Cargo, Companion, Wide, int], None]] = {
    Rule.VARIANCE: Cargo._unpack_variance,
    Rule.MAXIMUM: Cargo._unpack_maximum,
    Rule.COPY: Cargo._unpack_copy,
}


def _as_numbers(value: Array) -> Wide:
    """Every element as numbers that float64 holds exactly; a 64-bit integer is two."""
    if value.dtype.kind == "c":
        value = np.stack([value.real, value.imag])
    if value.dtype.kind in "biu":
        value = value.astype(np.int64).reshape(-1).view(np.int32)
    return value.astype(np.float64).reshape(-1)


def _from_numbers(numbers: Wide, like: Array) -> Array:
    if like.dtype.kind == "c":
        real, imag = numbers.reshape(2, *like.shape)
        return np.asarray(real + 1j * imag)
    if like.dtype.kind in "biu":
        return np.rint(numbers).astype(np.int32).view(np.int64).reshape(like.shape).astype(like.dtype)
    return numbers.reshape(like.shape)
