"""Rounds that go on while training does: begun on a copy of the parameters, and applied some steps later.

What is applied is the *change* that averaging would have made, ``x += mean(copy) - copy``, so that the steps taken
meanwhile are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from .adapters import Adapter, DelayedReduction
from .agreement import Claim
from .channel import Channel
from .collect import Collected, collect, collect_or_explain
from .errors import AveragingError
from .header import Presence, Tally
from .layout import Bucket, Layout
from .round import Agreed, Begun, Round, Rounds, to_the_end


@dataclass(frozen=True)
class _UnderWay:
    """``spare`` are the copies, if the reduction that has begun has none, as this rank brought other parameters."""

    claim: Claim
    tensors: Sequence[Any]
    spare: Sequence[Any] | None
    channel: Channel
    begun: Begun
    seconds: float


class DelayedRounds(Rounds):
    """Rounds of which one may be under way, of the parameters that :meth:`begin` was given."""

    def __init__(self, name: str, process_set: Any, timeout: float | None, bucket_bytes: int | None = None) -> None:
        super().__init__(name, process_set, timeout, bucket_bytes)
        self._under_way: _UnderWay | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._under_way is not None:
            raise AveragingError(f"{self.name}: call averager.flush() on every rank before you copy the averager.")
        return super().__getstate__()

    @property
    def is_under_way(self) -> bool:
        return self._under_way is not None

    @property
    def started_at(self) -> int:
        """The step at which the round under way began."""
        assert self._under_way is not None, "asked while a round is under way"
        return self._under_way.claim.step

    def snapshot(self) -> dict[str, Any]:
        """Copies of what is being averaged, by name; a checkpoint needs them."""
        it = self._under_way
        assert it is not None, "asked while a round is under way"
        names = (entry.name for entry in it.claim.layout.entries)
        reduction = cast(DelayedReduction, it.begun.agreed.reduction)
        copies = reduction.copies(it.tensors) if it.spare is None else it.spare
        return dict(zip(names, copies, strict=True))

    def begin(self, params: object, step: int, settings: str, snapshot: Mapping[str, Any] | None = None) -> None:
        """Begin to average a copy of ``params``, or the ``snapshot`` that an earlier process took of them.

        Raises:
            AveragingError: one of its subclasses; nothing was begun.
            TypeError, ValueError: ``params`` cannot be averaged; the other ranks are told before it is raised.
        """
        started = time.perf_counter()
        collected, failure = self._collect(params, Presence.AVERAGING)
        channel = self._channel(collected, step)
        if not channel.members.included or channel.members.alone:
            if failure is not None:
                raise failure
            return
        source = collected.tensors if snapshot is None else _restored(collected, snapshot)
        claim = Claim(step, Presence.AVERAGING, settings + self._travel(), collected.layout, failure)
        try:
            begun = self._begin(claim, source, True, channel)
        except AveragingError as error:
            self._give_up(error)
            raise
        spare = None if begun.contributes else [collected.adapter.copy(tensor) for tensor in source]
        seconds = time.perf_counter() - started
        self._under_way = _UnderWay(claim, collected.tensors, spare, channel, begun, seconds)

    def finish(self, params: object = None) -> Round | None:
        """Wait for the round under way, and add what it changes to ``params`` (by default those it began with).

        Raises:
            AveragingError: one of its subclasses; the parameters are untouched.
        """
        if self._under_way is None:
            return None
        started = time.perf_counter()
        it = self._under_way
        agreed, tally = self._wait()
        now = None if params is None else collect(params)
        tensors = it.tensors if now is None else now.tensors
        if now is not None and not _alike(now, it.claim.layout, it.tensors):
            raise AveragingError(
                f"{it.channel.where}: the parameters are not those that this round began with. Call averager.flush() "
                "on every rank before you change them."
            )
        cast(DelayedReduction, agreed.reduction).add_change(tensors, tally.contributors)
        seconds = it.seconds + time.perf_counter() - started
        return Round(it.claim.step, seconds, agreed.reduction.bytes, len(tensors), tally.contributors)

    def forget(self) -> None:
        """Let the round under way come to nothing, on every rank: something else has been loaded."""
        if self._under_way is not None:
            self._wait()

    def _wait(self) -> tuple[Agreed, Tally]:
        assert self._under_way is not None, "asked while a round is under way"
        it, self._under_way = self._under_way, None
        try:
            return to_the_end(self._reduce(it.claim, it.spare or it.tensors, True, it.channel, it.begun))
        except AveragingError as error:
            self._give_up(error)
            raise

    def _basis(self, adapter: Adapter, buckets: Sequence[Bucket], tensors: Sequence[Any]) -> int:
        return 0  # training goes on in the parameters, so that they cannot be summed where they lie

    def _make_reduction(
        self,
        layout: Layout,
        buckets: Sequence[Bucket],
        tensors: Sequence[Any],
        name: str,
        channel: Channel,
        same_basis: bool,
    ) -> DelayedReduction:
        return channel.adapter.delayed_reduction(buckets, tensors, name, channel.members)


def _restored(collected: Collected, snapshot: Mapping[str, Any]) -> list[Any]:
    """Copies of the parameters, as an earlier process has taken them."""
    names = [entry.name for entry in collected.layout.entries]
    if set(names) != set(snapshot):
        raise AveragingError(
            "The checkpoint was saved while a round over other parameters was under way: load it into the same model, "
            "or call averager.flush() on every rank before saving."
        )
    copies = [collected.adapter.copy(tensor) for tensor in collected.tensors]
    for name, copy in zip(names, copies, strict=True):
        collected.adapter.restore(copy, snapshot[name])
    return copies


def _alike(now: Collected, layout: Layout, tensors: Sequence[Any]) -> bool:
    """Whether these are the parameters that a round began with, or, by their names, those that have replaced them."""
    entries, before = now.layout.entries, layout.entries
    if [(entry.shape, entry.dtype) for entry in entries] != [(entry.shape, entry.dtype) for entry in before]:
        return False
    if all(one is two for one, two in zip(now.tensors, tensors, strict=True)):
        return True
    # A number is not the name of a parameter, but its place in a list that may hold others now.
    return all(one.name == two.name and not one.name.isdigit() for one, two in zip(entries, before, strict=True))


class Fragments:
    """The rounds of an averager that averages one part of the parameters at a time, or applies the mean later.

    Args:
        count: into how many parts the parameters are cut, of about equally many bytes.
        delay: optimizer steps from the beginning of a round to its end.
        make: makes the rounds of one part, given a name for it; :class:`DelayedRounds` if there is a delay.
    """

    def __init__(self, count: int, delay: int, make: Callable[[str], Rounds]) -> None:
        self.delay = delay
        self.rounds = [make(f"part {number} of {count}") for number in range(1, count + 1)]
        self._interrupted: list[Mapping[str, Any]] = []

    def advance(self, params: object, step: int, due: int | None, settings: str) -> Round | None:
        """Finish what ends at ``step``, and begin part ``due``; returns what the round did that ended."""
        self._begin_again(params, settings)
        done = None
        for number, delayed in self._under_way():
            if delayed.started_at + self.delay <= step:
                done = delayed.finish(self._part(params, number))
        if due is None:
            return done
        part = self._part(params, due % len(self.rounds))
        rounds = self.rounds[due % len(self.rounds)]
        if isinstance(rounds, DelayedRounds):
            rounds.begin(part, step, settings)
            return done
        met = rounds.run(part, step, settings)
        return None if met is None else met[0]

    def flush(self) -> Round | None:
        """Finish all that is under way; returns what the last of these rounds did."""
        if self._interrupted:
            raise AveragingError(
                "A round was under way when the checkpoint was saved, and begins again once the parameters are known: "
                "call averager.average_now(params) or averager.average_parameters(params) on every rank first."
            )
        done = None
        for _, rounds in sorted(self._under_way(), key=lambda item: item[1].started_at):
            done = rounds.finish()
        return done

    def settle(self, params: object, settings: str) -> None:
        """Finish all that is under way, or was when the state that was loaded was saved."""
        self._begin_again(params, settings)
        self.flush()

    def state(self) -> list[dict[str, Any]]:
        """What is under way, so that another process can begin it again."""
        now = [
            {"part": number, "step": rounds.started_at, "snapshot": rounds.snapshot()}
            for number, rounds in self._under_way()
        ]
        return [*now, *map(dict, self._interrupted)]

    def resume(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Take up :meth:`state` at the next step, for which the parameters are needed."""
        for _, rounds in self._under_way():
            rounds.forget()
        self._interrupted = list(state)

    def _under_way(self) -> list[tuple[int, DelayedRounds]]:
        return [
            (number, rounds)
            for number, rounds in enumerate(self.rounds)
            if isinstance(rounds, DelayedRounds) and rounds.is_under_way
        ]

    def _begin_again(self, params: object, settings: str) -> None:
        while self._interrupted:
            it = self._interrupted.pop(0)
            rounds = self.rounds[it["part"]]
            assert isinstance(rounds, DelayedRounds), "without a delay nothing is ever under way"
            rounds.begin(self._part(params, it["part"]), it["step"], settings, it["snapshot"])

    def _part(self, params: object, number: int) -> object:
        if len(self.rounds) == 1:
            return params
        collected, failure = collect_or_explain(params)
        if failure is not None:
            return params  # for the round to explain to all ranks
        entries = collected.layout.fragments(len(self.rounds))[number]
        return [(collected.layout.entries[entry].name, collected.tensors[entry]) for entry in entries]
