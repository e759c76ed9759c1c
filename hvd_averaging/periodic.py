"""The schedule of one level: a round every so many steps, at once or delayed, of all parameters or of a part."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from .adapters import Recorder
from .averagers import DEFAULT_TIMEOUT, ModelAverager, whole_warmup
from .collect import reusable
from .delayed import DelayedRounds, Fragments
from .errors import AveragingError
from .round import Meeting, Round, Rounds


class PeriodicModelAverager(ModelAverager):
    """Averages every ``period`` steps, after ``warmup_steps``.

    Local SGD (Stich, 2019, arXiv:1805.09767) with a period of H steps; with gradient averaging during warm-up it is
    post-local SGD (Lin et al., 2020, arXiv:1808.07217). The contract is that of ``torch.distributed``'s
    ``PeriodicModelAverager``: a round at every ``step`` for which ``step >= warmup_steps`` and
    ``(step - warmup_steps) % period == 0``, so the first one comes with the first step after warm-up.

    Args:
        period: optimizer steps from one round to the next, at least 1.
        warmup_steps: optimizer steps before the first round, at least 0.
        process_set, process_group, timeout, name, bucket_bytes, buffers, wire: see :class:`ModelAverager`.
        delay: optimizer steps that training goes on while a round is under way (PyTorch only). The round is over a copy
            taken at its step; ``delay`` steps later every rank adds ``mean(copy) - copy``, so that the steps taken
            meanwhile are kept. Less than ``period``. The call that ends a round returns it.
        fragments: average one of so many parts of the parameters every ``period / fragments`` steps, in turns, so that
            each is averaged every ``period`` steps but less travels at a time. Parts are of whole tensors and about
            equally large. ``fragments`` divides ``period``.

    Raises:
        ValueError: ``period < 1``, ``warmup_steps < 0``, a ``delay`` not from 0 to ``period - 1``, ``fragments`` that
            do not divide ``period``, or ``buffers`` with either of them.
        TypeError: not whole numbers, both ``process_set`` and ``process_group``, or something else for them.

    Example::

        >>> averager = PeriodicModelAverager(period=4, warmup_steps=10)
        >>> [step for step in range(20) if averager.due(step)]
        [10, 14, 18]
    """

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        process_set: Any = None,
        *,
        process_group: Any = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        name: str | None = None,
        bucket_bytes: int | None = None,
        buffers: str = "local",
        wire: str | None = None,
        delay: int = 0,
        fragments: int = 1,
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
        self.period = operator.index(period)
        if period < 1:
            raise ValueError(f"period must be at least 1 step; it is {period}.")
        if period == 1:
            warnings.warn(
                "With period=1 every step moves all parameters: averaging gradients (hvd.DistributedOptimizer) costs "
                "no more. Averaging pays off from period=2 on.",
                stacklevel=2,
            )
        self.delay, self.fragments = operator.index(delay), operator.index(fragments)
        _check_parts(self)
        self._parts = Fragments(self.fragments, self.delay, self._make_part) if self._in_parts else None
        if self._parts is not None:  # what is left for the whole is exact: no anchor of it is kept
            self._rounds = Rounds(self.name, process_set, timeout, bucket_bytes, buffers)

    @property
    def _in_parts(self) -> bool:
        return self.delay > 0 or self.fragments > 1

    def _make_part(self, part: str) -> Rounds:
        name = f"{self.name}, {part}"
        if self.delay:
            return DelayedRounds(name, self.process_set, self.timeout, self._bucket_bytes)
        return self._make_rounds(name, self.process_set)

    def _all_rounds(self) -> Sequence[Rounds]:
        return [self._rounds] if self._parts is None else self._parts.rounds

    def due(self, step: int) -> bool:
        # Written so that it also serves a counter in a TensorFlow graph.
        return (step >= self.warmup_steps) & ((step - self.warmup_steps) % (self.period // self.fragments) == 0)

    def describe(self) -> str:
        """For example ``PeriodicModelAverager(period=4, warmup_steps=10, name='PeriodicModelAverager')``."""
        parts = f", delay={self.delay}, fragments={self.fragments}" if self._in_parts else ""
        return (
            f"{type(self).__name__}(period={self.period}, warmup_steps={self.warmup_steps}, name={self.name!r}{parts})"
        )

    def _is_idle(self, steps: Sequence[int]) -> bool:
        return self._parts is None and super()._is_idle(steps)

    def _advance(self, params: object, steps: Sequence[int]) -> Meeting[Round | None]:
        if self._parts is None:
            return (yield from super()._advance(params, steps))
        params = reusable(params)
        done = None
        for step in steps:
            part = (step - self.warmup_steps) * self.fragments // self.period if self.due(step) else None
            done = self._parts.advance(params, step, part, self.describe()) or done
        return done

    def flush(self) -> Round | None:
        return None if self._parts is None else self._parts.flush()

    def _settle(self, params: object) -> None:
        if self._parts is not None:
            self._parts.settle(params, self.describe())

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold to resume: the step, and if rounds are delayed, copies of what is under way.

        These are of this rank: save on every rank, or call :meth:`flush` on every rank first.
        """
        under_way = [] if self._parts is None else self._parts.state()
        return {**super().state_dict(), **({"under_way": under_way} if under_way else {})}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._parts is not None and self.delay:
            self._parts.resume(state_dict.get("under_way", ()))

    def join(self, params: object) -> Round | None:
        self._refuse_parts("join() meets the other ranks in whole rounds at once")
        return super().join(params)

    def _record(self, graph: Recorder, params: object, steps: int) -> None:
        self._refuse_parts("a graph runs whole rounds at once")
        super()._record(graph, params, steps)

    def _refuse_parts(self, reason: str) -> None:
        if self._in_parts:
            raise AveragingError(f"{self.name}: {reason}: use delay=0 and fragments=1.")


def _check_parts(averager: PeriodicModelAverager) -> None:
    period, delay, fragments = averager.period, averager.delay, averager.fragments
    if not 0 <= delay < period:
        raise ValueError(f"delay is from 0 to {period - 1} steps, so that a round ends before the next; not {delay}.")
    if fragments < 1 or period % fragments:
        raise ValueError(f"fragments must divide the period, {period}; {fragments} does not.")
    if delay and averager.wire is not None:
        raise ValueError(f"wire={averager.wire!r} works without delay only.")
    if (delay or fragments > 1) and averager.buffers != "local":
        raise ValueError(f"buffers={averager.buffers!r} works without delay and fragments only.")
