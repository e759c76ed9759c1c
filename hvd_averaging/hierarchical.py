"""The schedule of several levels: small groups of ranks average often, all of them rarely."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from .averagers import DEFAULT_TIMEOUT, ModelAverager, whole_warmup
from .errors import AveragingError
from .members import members
from .process_sets import hierarchy, initialized
from .round import Round, Rounds


class HierarchicalModelAverager(ModelAverager):
    """Averages small groups often and large ones rarely: within a node every few steps, over all ranks now and then.

    Hierarchical local SGD (Lin et al., 2020, arXiv:1808.07217, section 5). The contract is that of
    ``torch.distributed``'s ``HierarchicalModelAverager``: at a step that several periods divide, only the round of the
    largest one runs. As there, steps are counted from 0, not from the end of warm-up as ``PeriodicModelAverager``
    counts them: after ``warmup_steps=5`` the first round of a period of 4 is at step 8.

    The groups are made when the averager is, on all ranks together, of neighbouring ranks; see
    :mod:`hvd_averaging.process_sets` for how Horovod is told to allow that.

    Args:
        period_group_size_dict: period (in optimizer steps) to group size (in ranks), in any order; both increase
            strictly together, each size divides the next, and the last is the size of the process set.
        warmup_steps: optimizer steps before the first round, at least 0.
        process_set: the ranks that the largest groups consist of; ``None`` is all ranks.
        process_group, timeout, name, bucket_bytes, buffers, wire: see :class:`ModelAverager`.

    Raises:
        ValueError: on all ranks, for a dict that is not like that, or a negative ``warmup_steps``.
        ProcessSetError: Horovod knows no such groups and may not add them.
        HorovodNotInitializedError: ``hvd.init()`` was not called yet.

    Example, for eight ranks on two hosts::

        averager = HierarchicalModelAverager({4: 4, 16: 8}, warmup_steps=100)
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int],
        warmup_steps: int = 0,
        process_set: Any = None,
        *,
        process_group: Any = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        name: str | None = None,
        bucket_bytes: int | None = None,
        buffers: str = "local",
        wire: str | None = None,
    ) -> None:
        super().__init__(
            process_set,
            process_group=process_group,
            timeout=timeout,
            name=name,
            bucket_bytes=bucket_bytes,
            buffers=buffers,
            wire=wire,
        )
        self.warmup_steps = whole_warmup(warmup_steps)
        self.period_group_size_dict = dict(sorted(period_group_size_dict.items()))
        _check_levels(self.period_group_size_dict, members(self.process_set, initialized().hvd).size)
        sets = hierarchy(list(self.period_group_size_dict.values()), self.process_set)
        self._levels = {
            period: self._make_rounds(f"{self.name}/{size}", level)
            for (period, size), level in zip(self.period_group_size_dict.items(), sets, strict=True)
        }
        self._rounds = self._levels[max(self._levels)]

    def due(self, step: int) -> bool:
        divides = functools.reduce(operator.or_, (step % period == 0 for period in self.period_group_size_dict))
        return (step >= self.warmup_steps) & divides

    def describe(self) -> str:
        """For example ``HierarchicalModelAverager({4: 4, 16: 8}, warmup_steps=0, name='mine')``."""
        levels = self.period_group_size_dict
        return f"{type(self).__name__}({levels}, warmup_steps={self.warmup_steps}, name={self.name!r})"

    def join(self, params: object) -> Round | None:
        """Not available: a rank without batches could only wait for one of its groups, and the others would stall."""
        raise AveragingError(
            f"{self.name}: join() cannot serve several levels. Give every rank equally many batches (drop the "
            "surplus), or use PeriodicModelAverager."
        )

    def _all_rounds(self) -> Sequence[Rounds]:
        return list(self._levels.values())

    def _rounds_at(self, step: int) -> Rounds:
        return next(rounds for period, rounds in reversed(self._levels.items()) if step % period == 0)

    def _due_among(self, steps: Sequence[int]) -> int | None:
        due = [step for step in steps if self.due(step)]
        return max(due, key=lambda step: (max(p for p in self._levels if step % p == 0), step), default=None)


def _check_levels(levels: Mapping[int, int], size: int) -> None:
    if not levels:
        raise ValueError("period_group_size_dict is empty: it needs at least {period: number of ranks}.")
    if min(levels) < 1:
        raise ValueError(f"Periods are at least 1 step; {min(levels)} is not.")
    sizes = list(levels.values())
    if sizes != sorted(set(sizes)):
        raise ValueError(f"Longer periods need larger groups; {dict(levels)} has not.")
    if sizes[-1] != size:
        raise ValueError(f"The longest period must average over all {size} ranks of the process set, not {sizes[-1]}.")
    if list(levels) == [1]:
        warnings.warn(
            "With a single period of 1 every step moves all parameters: averaging gradients costs no more.",
            stacklevel=3,
        )
