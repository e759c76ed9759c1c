"""Callbacks that change weights: averaging them now and then, and equal starts."""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import keras

from ..averagers import ModelAverager
from ..errors import StepMismatchError
from ..hierarchical import HierarchicalModelAverager
from ..replicas import broadcast_parameters
from ..round import Round
from .meeting import START_TIMEOUT, MeetingCallback

_UNBUILT, _BUILT, _DONE = range(3)


class BroadcastCallback(MeetingCallback):
    """Every rank starts with the weights, optimizer state, step count and learning rate of ``root_rank``.

    After ``horovod.keras.callbacks.BroadcastGlobalVariablesCallback``. It copies before the first batch, or, if the
    model is only built by its first batch, right after that. It does so once for a model, not at every ``fit``, and may
    stand before or after :class:`ModelAveragingCallback`. What is not a weight stays as it is on every rank: seeds of
    ``Dropout`` (equal ones would drop the same units everywhere), metrics, and vocabularies, which are no variables.

    Args:
        root_rank: the rank, numbered over the whole job, whose values all take.
        process_set: a ``horovod.ProcessSet`` that ``root_rank`` belongs to; ``None`` is all ranks.
        start_timeout: seconds to wait for the other ranks at the start of training; ``None`` waits for ever.

    Raises in fit:
        ValueError: the model has no optimizer, or ``root_rank`` is not in the process set.
        AveragingError: one of its subclasses: the models differ, or another rank has not got this callback.

    Example::

        >>> model.fit(x, y, callbacks=[BroadcastCallback()])  # doctest: +SKIP
    """

    def __init__(
        self, root_rank: int = 0, process_set: Any = None, *, start_timeout: float | None = START_TIMEOUT
    ) -> None:
        super().__init__(process_set, start_timeout)
        self.root_rank = root_rank
        self._served: weakref.WeakSet[Any] = weakref.WeakSet()

    def describe(self) -> str:
        return f"BroadcastCallback(root_rank={self.root_rank})"

    def state(self) -> int:
        return _DONE if self.model in self._served else _BUILT if self.model.built else _UNBUILT

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        states = self.meet()
        if set(states) <= {_DONE}:
            return
        if _UNBUILT in states:
            # The counters exist already, and whoever counts needs equal ones from the first batch on.
            self._send(_counters(self.model.optimizer))
            _waiting[self.model] = self
            return
        if not self.model.optimizer.built:  # one rank may have loaded an optimizer that has its slots already
            self.model.optimizer.build(self.model.trainable_variables)
        self.broadcast()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        broadcast_if_waiting(self.model)

    def broadcast(self) -> None:
        """Copy the model and its optimizer from ``root_rank`` now; all ranks call it together."""
        _waiting.pop(self.model, None)
        self._send([*self.model.weights, *self.model.optimizer.variables])
        self._served.add(self.model)

    def _send(self, variables: list[Any]) -> None:
        # Numbered, and without paths, which depend on how many models a process has made before.
        weights = {id(weight): weight.name for weight in self.model.weights}
        names = (weights.get(id(variable), "of the optimizer") for variable in variables)
        named = [
            (f"{number} {name}", variable) for number, (name, variable) in enumerate(zip(names, variables, strict=True))
        ]
        broadcast_parameters(named, self.root_rank, self.process_set)


_waiting: weakref.WeakKeyDictionary[Any, BroadcastCallback] = weakref.WeakKeyDictionary()
"""Models that do not start equal yet, because their first batch is still to build them."""


def broadcast_if_waiting(model: Any) -> None:
    """Make up for a broadcast that had to wait for the model to be built."""
    if model in _waiting:
        _waiting[model].broadcast()


class ModelAveragingCallback(MeetingCallback):
    """Averages the model in ``fit``, when its averager's schedule says so.

    Counts optimizer steps, by ``model.optimizer.iterations``: neither batches per execution nor accumulated gradients
    nor a resumed training change the meaning of ``period``. When training starts, ``averager.step`` becomes
    ``optimizer.iterations``. (Under a ``LossScaleOptimizer`` steps are counted that were tried, since one rank alone
    may skip a step because of an overflow.) With ``steps_per_execution`` greater than ``period``, Keras hands over
    control only after every execution, so that there is one round for each.

    Ranks may have different numbers of batches if a round ends every epoch or the training (``average_at_...``): the
    rank that is done first then takes part in the rounds of the others. (Not with a ``HierarchicalModelAverager``.)

    Args:
        averager: says when, and over which process set, such as :class:`hvd_averaging.PeriodicModelAverager`.
        variables: what is averaged: anything that ``averager.average_parameters`` takes, such as a layer or a list of
            variables; by default the model's trainable variables.
        average_at_epoch_end: end every epoch with a round, which comes before the validation in ``fit``, and before
            whatever follows this callback in the list of callbacks does at the end of an epoch. Checkpoints and
            validation then see the mean; without it, each rank validates and saves a model of its own.
        average_at_train_end: end the training with a round, so that all ranks leave ``fit`` with the same weights.
        start_timeout: seconds to wait for the other ranks at the start of training; ``None`` waits for ever.

    Attributes:
        last_round: what the latest round did, a :class:`hvd_averaging.Round`.

    Raises in fit:
        ValueError: the model has no optimizer.
        StepMismatchError: the ranks start at, or come to, different steps.
        AveragingError: one of its other subclasses: another rank has not got this callback, or see
            :meth:`hvd_averaging.ModelAverager.average_parameters`.

    Example::

        >>> averager = PeriodicModelAverager(period=8, warmup_steps=100)  # doctest: +SKIP
        >>> model.fit(x, y, callbacks=[BroadcastCallback(), ModelAveragingCallback(averager)])  # doctest: +SKIP
    """

    def __init__(
        self,
        averager: ModelAverager,
        variables: object = None,
        *,
        average_at_epoch_end: bool = False,
        average_at_train_end: bool = True,
        start_timeout: float | None = START_TIMEOUT,
    ) -> None:
        if not isinstance(averager, ModelAverager):
            raise TypeError(
                f"averager is a {type(averager).__name__}: pass one such as PeriodicModelAverager(period=8)."
            )
        if averager.delay or averager.fragments > 1:
            raise ValueError("The callback needs an averager without delay and fragments.")
        super().__init__(averager.process_set, start_timeout)
        self.averager = averager
        self.variables = list(variables) if isinstance(variables, Iterator) else variables
        self.average_at_epoch_end = average_at_epoch_end
        self.average_at_train_end = average_at_train_end
        self.last_round: Round | None = None
        self._training = False
        self._settled = True  # whether all ranks hold the same model, for all that this rank knows
        self._clock: _Clock | None = None
        self._started = False

    def describe(self) -> str:
        when = f"average_at_epoch_end={self.average_at_epoch_end}, average_at_train_end={self.average_at_train_end}"
        return f"ModelAveragingCallback({self.averager.describe()}, {when})"

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.meet()
        self._training, self._settled, self._started = True, True, False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._settled = False

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._started:  # not at the start of training, where a later callback may still restore the optimizer
            self._clock, self._started = self._start_clock(), True
        assert self._clock is not None, "it has been started"
        self._clock.begin(batch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        assert self._clock is not None, "a batch begins before it ends"
        broadcast_if_waiting(self.model)
        done = self.averager.average_parameters(self._params(), steps=self._clock.steps(batch, self.params))
        self.last_round = done or self.last_round

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.average_at_epoch_end:
            self._settle()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self.average_at_epoch_end:
            self._settle()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self.average_at_train_end:
            self._settle()
        self._training = False

    def _settle(self) -> None:
        """End the steps that were taken since the last common round with another one, once."""
        if self._training and not self._settled:
            levels = isinstance(self.averager, HierarchicalModelAverager)  # which has no join
            settle = self.averager.average_now if levels else self.averager.join
            self.last_round = settle(self._params()) or self.last_round
            self._settled = True

    def _params(self) -> object:
        return self.model if self.variables is None else self.variables

    def _start_clock(self) -> _Clock:
        optimizer, averager = self.model.optimizer, self.averager
        scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        # From an earlier `fit`, ranks with fewer batches or skipped steps have been brought into line with the others.
        goes_on = self._clock is not None and self._clock.goes_on(optimizer)
        start = self._agreed_start(averager.step if goes_on else int(optimizer.iterations), may_differ=scaled)
        if averager.step not in (0, start):
            warnings.warn(
                f"{averager.name} has counted {averager.step} steps, but the optimizer {start}: counting goes on from "
                "the optimizer's. To resume a training, restore the optimizer along with the weights.",
                stacklevel=2,
            )
        if averager.step != start:
            averager.step = start
        return _AttemptClock(optimizer) if scaled else _IterationClock(optimizer)

    def _agreed_start(self, iterations: int, may_differ: bool) -> int:
        channel = self.channel()
        if channel is None:
            return iterations
        steps = {rank: row[0] for rank, row in channel.gather([iterations], "keras.steps").items()}
        if len(set(steps.values())) > 1 and not may_differ:
            listed = ", ".join(f"rank {rank} at step {step}" for rank, step in steps.items())
            raise StepMismatchError(
                f"{channel.where}: the optimizers start at different steps: {listed}. Load the checkpoint, optimizer "
                "included, on every rank, or on one and add BroadcastCallback() to the callbacks."
            )
        return max(steps.values())


class _Clock(ABC):
    """How many optimizer steps an execution of batches was."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._seen = int(optimizer.iterations)

    def goes_on(self, optimizer: Any) -> bool:
        """Whether ``optimizer`` has done nothing that this clock has not seen."""
        return optimizer is self.optimizer and int(optimizer.iterations) == self._seen

    def begin(self, batch: int) -> None:  # noqa: B027 - not every clock needs it
        """Note the first batch of an execution."""

    @abstractmethod
    def steps(self, batch: int, params: dict[str, Any]) -> int:
        """The optimizer steps since the last call, at the end of ``batch``, the last one of an execution."""


class _IterationClock(_Clock):
    """By the optimizer's own count."""

    def steps(self, batch: int, params: dict[str, Any]) -> int:
        seen, self._seen = self._seen, int(self.optimizer.iterations)
        return self._seen - seen


class _AttemptClock(_Clock):
    """By batches: the optimizer does not count a step that it skips, and a rank does not know what others skip."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._accumulated = optimizer.inner_optimizer.gradient_accumulation_steps or 1
        self._first = self._batches = 0

    def begin(self, batch: int) -> None:
        self._first = batch

    def steps(self, batch: int, params: dict[str, Any]) -> int:
        self._seen = int(self.optimizer.iterations)
        before = self._batches // self._accumulated
        # Keras calls the last execution of an epoch as long as the others, even if batches run out in it.
        last = min(batch, (params.get("steps") or batch + 1) - 1)
        self._batches += last - self._first + 1
        return self._batches // self._accumulated - before


def _counters(optimizer: Any) -> list[Any]:
    inner = getattr(optimizer, "inner_optimizer", None)
    return [optimizer._iterations, *([] if inner is None else [inner._iterations])]
