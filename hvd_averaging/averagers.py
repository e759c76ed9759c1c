"""When a round happens: what all schedules share (``periodic`` and ``hierarchical`` hold those there are).

An averager counts optimizer steps and runs a round when its schedule says so. The names, arguments and the counting are
those of ``torch.distributed.algorithms.model_averaging.averagers``, so that ported code runs; what is averaged, and
how, is in ``collect`` and ``round``.
"""

from __future__ import annotations

import itertools
import operator
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .adapters import Recorder, outside_autograph, recorder
from .collect import collect, normalizes, peek, restoring, reusable
from .companions import check_buffers, copies
from .errors import AveragingError
from .header import Presence
from .members import check_process_set
from .round import Meeting, Round, Rounds, to_the_end
from .wire import WireRounds, check_wire

if TYPE_CHECKING:
    from typing_extensions import Self

DEFAULT_TIMEOUT = 1800.0
"""Seconds that a rank waits for the others in a round: what ``torch.distributed`` allows a Gloo collective."""


class ModelAverager(ABC):
    """Counts optimizer steps and averages parameters over a process set when a round is due.

    A subclass says when, in :meth:`due`. After ``torch.distributed``'s class of this name.

    Args:
        process_set: the ranks that average with each other, a ``horovod.ProcessSet``; ``None`` is all ranks. A rank
            outside the set counts its calls and does nothing else.
        process_group: the same, by the name that ``torch.distributed`` uses.
        timeout: seconds to wait for the other ranks in a round before an error ends it; ``None`` waits for ever.
        name: what messages and collectives are called by, the same on every rank. Averagers of one class need
            different names only where the names and shapes of their parameters do not tell them apart.
        bucket_bytes: the size of the largest buffer that parameters travel in; ``None`` is what measures best: 32 MB if
            more than 64 MB of PyTorch parameters on the CPU have to be packed, otherwise as much as Horovod can
            count. With PyTorch, more buckets than two take turns in the memory of two: while one is reduced, the mean
            of the last is written and the next is packed. Should a collective fail in the middle (because a rank or the
            network breaks down), some parameters then hold the mean already, as the error says; in one bucket
            (``2**40``) nothing is written before all is reduced.
        buffers: what a round does with the buffers of a model (pass it the model itself). ``"local"``: nothing.
            ``"average"``: floating-point ones become the mean, a variance that belongs to a mean (batch
            normalization) becomes that of all replicas' data together, ``E[var] + Var[mean]`` by the law of total
            variance with equally weighted replicas, whole numbers without dimensions are taken for counters and become
            the maximum, and others stay. ``"broadcast"``: all become those of the first rank of the process set.
        wire: what travels in a round. ``None``: the parameters. ``"fp16"``, ``"bf16"``, and with PyTorch ``"int8"``:
            how far they have moved from the last agreed weights, in 2, 2 and 4 times fewer bytes than float32 takes
            (8-bit integers with a scale for every 512 elements). What that leaves out is kept and goes along with the
            next change (error feedback), sums are formed in float32, and all ranks end a round with the same weights.
            The first round, :meth:`average_now`, :meth:`averaged`, and rounds with a rank in ``hvd.join()`` or with
            changes that are infinite, NaN or too large for float16, send the parameters as they are; buffers always
            travel so. Takes two more copies of the parameters in memory, and up to three of what travels.

    As a context manager an averager checks at the end that all ranks counted the same number of steps, and raises
    :class:`StepMismatchError` on every rank if not; when the block ends by an exception, it does nothing.
    """

    def __init__(
        self,
        process_set: Any = None,
        *,
        process_group: Any = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        name: str | None = None,
        bucket_bytes: int | None = None,
        buffers: str = "local",
        wire: str | None = None,
    ) -> None:
        if process_set is not None and process_group is not None:
            raise TypeError("process_set and process_group mean the same: pass only one of them.")
        process_set = process_group if process_set is None else process_set
        check_process_set(process_set)
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout is a positive number of seconds, or None to wait for ever; not {timeout!r}.")
        if bucket_bytes is not None and bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is a positive number of bytes, or None; not {bucket_bytes!r}.")
        check_buffers(buffers)
        check_wire(wire)
        self._counter: Any = 0  # or a variable of the framework, once a graph counts
        self._last_round: int | None = None
        self._first: weakref.ref[Any] | None = None
        self._name = name or type(self).__name__
        self._process_set = process_set
        self._timeout, self._bucket_bytes, self._buffers = timeout, bucket_bytes, buffers
        self._wire = wire
        self._pauses = 0
        self._warned_of_buffers = False
        self._rounds = self._make_rounds(self._name, process_set)

    def _make_rounds(self, name: str, process_set: Any) -> Rounds:
        if self._wire is not None:
            return WireRounds(name, process_set, self._timeout, self._bucket_bytes, self._buffers, self._wire)
        return Rounds(name, process_set, self._timeout, self._bucket_bytes, self._buffers)

    def _all_rounds(self) -> Sequence[Rounds]:
        """Every place where rounds of this averager happen."""
        return [self._rounds]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_first": None, "_counter": self.step}

    warmup_steps: int = 0
    """Optimizer steps before the first round. Fronts that average gradients until then look here."""
    delay: int = 0
    """Optimizer steps from the beginning of a round to its end."""
    fragments: int = 1
    """In how many parts the parameters are averaged."""

    @abstractmethod
    def due(self, step: int) -> bool:
        """Whether a round happens at ``step``; must be the same on every rank.

        Inside a ``tf.function``, ``step`` is a tensor: write ``&`` and ``|`` for ``and`` and ``or``, and no ``if``.
        """

    @abstractmethod
    def describe(self) -> str:
        """The schedule as text. Ranks compare it before the first round."""

    @property
    def name(self) -> str:
        """What messages and collectives call this averager by."""
        return self._name

    @property
    def step(self) -> int:
        """How many optimizer steps were counted; starts at 0."""
        return int(self._counter)

    @step.setter
    def step(self, step: int) -> None:
        self._count_to(step)
        self._last_round = None  # whoever sets the count may have set the parameters, too

    def _count_to(self, step: int) -> None:
        if hasattr(self._counter, "assign"):
            self._counter.assign(step)
        else:
            self._counter = step

    @property
    def process_set(self) -> Any:
        """The process set that was passed in; ``None`` is all ranks."""
        return self._process_set

    @property
    def timeout(self) -> float | None:
        """Seconds that a rank waits for the others in a round; ``None`` is for ever."""
        return self._timeout

    @property
    def buffers(self) -> str:
        """What a round does with a model's buffers, ``"local"``, ``"average"`` or ``"broadcast"``."""
        return self._buffers

    @property
    def wire(self) -> str | None:
        """What the change of the parameters travels in; ``None`` if they travel as they are."""
        return self._wire

    @outside_autograph
    def average_parameters(self, params: object, *, steps: int = 1) -> Round | None:
        """Count one optimizer step, and average if a round is due at it.

        Call it after ``optimizer.step()``, once per optimizer step, on every rank. Trainable floating-point and complex
        parameters are averaged, in place; frozen and integer ones are left alone. Whether a parameter has a gradient
        plays no part.

        Args:
            params: a model, ``model.parameters()``, ``model.named_parameters()``, an optimizer or its
                ``param_groups``, an iterable of tensors, or a dict of them; the same on every rank.
            steps: optimizer steps since the last call, the same on every rank. If rounds are due at several of them,
                one is run, at the last.

        Returns:
            What the round did, or ``None`` if there was none at this step.

        Inside a ``tf.function`` the call becomes part of the graph: whether a round is due is decided every time the
        graph runs, and the result is ``None``. Errors come as TensorFlow's, with the message of the error here.

        Raises:
            AveragingError: one of its subclasses says what went wrong: ranks that differ, a rank that failed or never
                came. No parameter was changed and the step was not counted.
            TypeError, ValueError: ``params`` cannot be averaged.
        """
        meeting = self._step(params, steps)
        return None if meeting is None else to_the_end(meeting)

    def _step(self, params: object, steps: int = 1) -> Meeting[Round | None] | None:
        """What :meth:`average_parameters` does, with pauses in it; ``None`` if that was no more than to count."""
        if steps < 0:
            raise ValueError(f"steps is the number of optimizer steps since the last call; {steps} cannot be.")
        params = self._recognise(params)
        if self._pauses:
            return None
        graph = recorder()
        if graph is not None:
            self._record(graph, params, steps)
            return None
        step = self.step
        if self._is_idle(range(step, step + steps)):
            self._count_to(step + steps)
            return None
        return self._act(params, range(step, step + steps))

    def _is_idle(self, steps: Sequence[int]) -> bool:
        return self._due_among(steps) is None

    def _act(self, params: object, steps: range) -> Meeting[Round | None]:
        done = yield from self._advance(params, steps)
        self._count_to(steps.stop)
        return done

    def _advance(self, params: object, steps: Sequence[int]) -> Meeting[Round | None]:
        """Run the round of these steps, one of which is due."""
        due = self._due_among(steps)
        assert due is not None, "or it would be idle"
        return (yield from self._average(params, due))

    def flush(self) -> Round | None:
        """Finish the rounds that are under way, if rounds are delayed; on every rank, before the model is changed.

        Returns:
            What the last of them did; ``None`` if there was none.

        Raises:
            AveragingError: as :meth:`average_parameters`.
        """
        return None

    def _settle(self, params: object) -> None:
        """Finish what is under way, before a round outside the schedule."""
        self.flush()

    @outside_autograph
    def average_now(self, params: object) -> Round | None:
        """Average now, whatever the schedule says, and count nothing; on every rank at the same step.

        For the end of training, or before a checkpoint: afterwards all ranks of the process set hold the mean.

        Args:
            params: as for :meth:`average_parameters`.

        Returns:
            What the round did; ``None`` on a rank outside the process set.

        Raises:
            AveragingError, TypeError, ValueError: as :meth:`average_parameters`.
        """
        params = reusable(self._recognise(params))
        self._settle(params)
        done = self._average_unscheduled(params)
        self._last_round = self.step - 1
        return done

    def _average_unscheduled(self, params: object) -> Round | None:
        # Told apart from a round of the schedule, which other ranks may be in by mistake.
        met = self._rounds.run(params, self.step, f"{self.describe()}, outside its schedule", exact=True)
        return None if met is None else met[0]

    @contextmanager
    def averaged(self, params: object) -> Iterator[None]:
        """Inside the block ``params`` hold the mean, after it each rank's own values again, bit for bit.

        For evaluating the averaged model in mid-training, buffers included if this averager averages them::

            with averager.averaged(model):
                accuracy = evaluate(model)

        All ranks of the process set enter together; leaving needs no communication, so an exception in the block, too,
        leaves every rank with its own values. Counts nothing. Needs a copy of the parameters while it lasts.

        Args:
            params: as for :meth:`average_parameters`.

        Raises:
            AveragingError, TypeError, ValueError: as :meth:`average_parameters`.
        """
        params = reusable(self._recognise(params))
        self._settle(params)
        with restoring(params, self._buffers):
            self._average_unscheduled(params)
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block :meth:`average_parameters` does nothing: no step is counted and no round is run.

        For steps that are not part of the training that is averaged, on every rank alike::

            with averager.paused():
                train_one_batch_of_something_else()

        Raises:
            AveragingError: a ``tf.function`` counts for this averager, and would not notice.
        """
        if hasattr(self._counter, "assign"):
            raise AveragingError(
                f"{self.name}: a tf.function counts by itself and cannot be paused: call another one, without "
                "average_parameters in it."
            )
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def _due_among(self, steps: Sequence[int]) -> int | None:
        """The step, of those counted by one call, whose round is run."""
        return next(filter(self.due, reversed(steps)), None)

    def _rounds_at(self, step: int) -> Rounds:
        """Where the round of ``step`` takes place."""
        return self._rounds

    def _average(self, params: object, step: int) -> Meeting[Round | None]:
        met = yield from self._rounds_at(step).meet(params, step, self.describe())
        self._last_round = step
        return None if met is None else met[0]

    def _record(self, graph: Recorder, params: object, steps: int) -> None:
        """Make a call part of the graph that is being recorded: from now on the counter lives in the framework."""
        if steps != 1:
            raise ValueError(
                f"{self.name}: inside a graph one call is one optimizer step; steps={steps} works outside."
            )
        params = reusable(params)
        if not hasattr(self._counter, "assign"):
            self._counter = graph.counter(self._counter)
        collected = collect(params, buffers=self._buffers)
        touched = [*collected.tensors, *(companion.tensor for companion in copies(collected.companions))]
        graph.record(self._counter, self.due, lambda step: to_the_end(self._average(params, step)), touched)

    def _recognise(self, params: object) -> object:
        """Refuse a second set of parameters: its calls would count as steps, and it might never be averaged."""
        params, first = peek(params)
        if self._first is None:
            self._warn_of_buffers(params)
        known = self._first() if self._first is not None else None
        if known is None:
            # Weak: parameters that were replaced for good may be followed by others.
            self._first = weakref.ref(first) if hasattr(first, "__weakref__") else None
        elif first is not known and type(first) is type(known):
            raise ValueError(
                f"{self.name} (step {self.step}) was given other parameters than in earlier calls. It counts one call "
                "as one optimizer step, so it serves one set of parameters: make one averager for each optimizer, or "
                "pass the parameters of all optimizers in one call, [*a.parameters(), *b.parameters()]."
            )
        return params

    def _warn_of_buffers(self, params: object) -> None:
        if self._buffers != "local" or self._warned_of_buffers or not normalizes(params):
            return
        self._warned_of_buffers = True
        warnings.warn(
            f"{self.name}: the model has batch normalization, whose running statistics stay different on every rank "
            'with buffers="local", so that evaluation differs, too. Pass buffers="average" to the averager.',
            stacklevel=4,
        )

    @outside_autograph
    def join(self, params: object) -> Round | None:
        """Say that this rank has no more batches, and stay with the others until they have none either.

        For ranks with different numbers of batches: call it on every rank after its last one (of an epoch, say). A rank
        that is done first brings what it has learned since the last round once more, and then takes over the mean in
        every further round of the others. The last round is common to all: afterwards all ranks hold the same weights
        and count the same (the largest) number of steps, and may train on.

        Args:
            params: as for :meth:`average_parameters`.

        Returns:
            What the last common round did; ``None`` on a rank outside the process set.

        Raises:
            AveragingError, TypeError, ValueError: as :meth:`average_parameters`.
        """
        params = reusable(self._recognise(params))
        if recorder() is not None:
            raise AveragingError(
                f"{self.name}: join() waits for other ranks and cannot be in a graph: call it outside."
            )
        while True:
            fresh = self.step - 1 != self._last_round
            met = self._rounds.run(params, self.step, self.describe(), Presence.JOINING, contributes=fresh)
            if met is None:
                return None
            self._last_round = self.step - 1
            done, tally = met
            if tally.joining == tally.present:
                self.step = self._rounds.line_up(self.step, self.describe())
                self._last_round = self.step - 1
                return done

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold to resume: ``"step"``, and with a ``wire`` the anchor and what was left out.

        What was left out is each rank's own: save on every rank to resume exactly. Where it is another rank's, it is
        not used, which costs no more than the rounding of one round.
        """
        states = [rounds.state() for rounds in self._all_rounds() if isinstance(rounds, WireRounds)]
        return {"step": self.step, **({"wire": states} if any(states) else {})}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from :meth:`state_dict`, on every rank. Without a ``"step"`` in it: a warning, and step 0."""
        if "step" not in state_dict:
            warnings.warn(
                f"{self.name}: the checkpoint has no averager step; counting starts at 0, warm-up included. Save "
                "averager.state_dict() along with the model to avoid this.",
                stacklevel=2,
            )
        self.step = int(state_dict.get("step", 0))
        wired = [rounds for rounds in self._all_rounds() if isinstance(rounds, WireRounds)]
        states = state_dict.get("wire", ())
        for rounds, state in itertools.zip_longest(wired, states[: len(wired)]):
            rounds.resume(state)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:  # never talk while an exception unwinds: the other ranks are somewhere else
            self.flush()
            self._rounds.run((), self.step, self.describe(), Presence.LEAVING)

    def __repr__(self) -> str:
        return f"<{self.describe()}, step {self.step}>"


def whole_warmup(steps: int) -> int:
    """``warmup_steps`` as an averager keeps them.

    Raises:
        ValueError: they are negative.
        TypeError: they are no whole number.
    """
    if operator.index(steps) < 0:
        raise ValueError(f"warmup_steps must not be negative; it is {steps}.")
    return operator.index(steps)
