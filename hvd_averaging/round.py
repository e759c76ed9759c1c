"""How a round goes: collect, agree, pack, reduce, unpack.

:class:`Rounds` is what an averager owns: it keeps the agreed layout and the buffers from one round to the next. It does
not know when a round is due, and it changes parameters only after every rank is known to have brought the same layout
at the same step.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from . import header as headers
from .adapters import Adapter, Pending, Reduction, Terms
from .agreement import Claim, agree
from .channel import UNTOUCHED, Channel
from .collect import Collected, collect, collect_or_explain
from .errors import AveragingError, AveragingTimeoutError, CollectiveError
from .header import Header, Presence, Tally
from .layout import Bucket, Layout, fingerprint
from .members import Members, members

if TYPE_CHECKING:
    from .cargo import Cargo

Outcome = TypeVar("Outcome")
Meeting = Generator[None, None, Outcome]
"""What goes on between ranks, with a pause after every collective that has begun."""

# Parameters that lie in one piece of memory are summed where they are; others may be written bucket by bucket.
_OVERWRITTEN = (
    "Some parameters here may hold sums over ranks, or means already: load them from a checkpoint before you go on."
)


@dataclass(frozen=True)
class Round:
    """What one round did.

    Attributes:
        step: the step at which it ran.
        seconds: how long the call took, waiting for other ranks included.
        bytes: what this rank handed to the collective, in bytes; a ring sends ``2 * (n - 1) / n`` times as much.
        tensors: how many tensors were averaged.
        ranks: how many ranks the mean is over (fewer than the process set while some are in ``hvd.join()``).
    """

    step: int
    seconds: float
    bytes: int
    tensors: int
    ranks: int


@dataclass(frozen=True)
class Agreed:
    """What holds until a rank brings other parameters: who, what, and the buffers for it."""

    adapter: Adapter
    members: Members
    layout: Layout
    buckets: tuple[Bucket, ...]
    basis: int
    same_basis: bool
    reduction: Reduction
    look: object = None


@dataclass(frozen=True)
class Begun:
    """A meeting that has begun: on what it rests, what is to be waited for, and whether this rank brings anything."""

    agreed: Agreed
    pending: Pending
    contributes: bool


def to_the_end(meeting: Meeting[Outcome]) -> Outcome:
    """The outcome of a meeting, without a pause."""
    try:
        while True:
            next(meeting)
    except StopIteration as end:
        return cast(Outcome, end.value)


class Rounds:
    """The rounds of one averager.

    Args:
        name: in messages and in the names of the collectives; the same on every rank.
        process_set: a Horovod process set, or ``None`` for the global one.
        timeout: seconds that a rank waits for the others, or ``None``.
        bucket_bytes: see :meth:`hvd_averaging.layout.Layout.buckets`.
        buffers: see :class:`hvd_averaging.ModelAverager`.
    """

    call = "average_parameters"
    """What the user calls to have a round."""
    apart = False
    """Whether tensors that share their memory are averaged each by itself."""

    def __init__(
        self,
        name: str,
        process_set: Any,
        timeout: float | None,
        bucket_bytes: int | None = None,
        buffers: str = "local",
    ) -> None:
        self.name = name
        self.process_set = process_set
        self.timeout = timeout
        self.bucket_bytes = bucket_bytes
        self.buffers = buffers
        self._agreed: Agreed | None = None
        self._cargo: tuple[Members, Cargo] | None = None
        self._known: dict[str, Collected] = {}
        self._broken: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Buffers and agreements belong to the running job: a copy agrees afresh in its first round.
        return {**self.__dict__, "_agreed": None, "_cargo": None, "_known": {}, "_broken": None}

    def run(
        self,
        params: object,
        step: int,
        settings: str,
        presence: Presence = Presence.AVERAGING,
        contributes: bool = True,
        exact: bool = False,
    ) -> tuple[Round, Tally] | None:
        """Meet the other ranks and, unless this rank leaves, average ``params`` over those that contribute.

        ``exact`` asks for the mean of the parameters as they are, where otherwise less would travel.

        Returns:
            What was done and who took part, or ``None`` on a rank outside the process set.

        Raises:
            AveragingError: one of its subclasses; the parameters are untouched, unless it says that some are not.
            TypeError, ValueError: ``params`` cannot be averaged; the other ranks are told before it is raised.
        """
        return to_the_end(self.meet(params, step, settings, presence, contributes, exact))

    def meet(
        self,
        params: object,
        step: int,
        settings: str,
        presence: Presence = Presence.AVERAGING,
        contributes: bool = True,
        exact: bool = False,
    ) -> Meeting[tuple[Round, Tally] | None]:
        """Like :meth:`run`, with a pause after every collective that has begun, before it is waited for."""
        started = time.perf_counter()
        collected, failure = self._collect(params, presence)
        channel = self._channel(collected, step)
        if not channel.members.included:
            return None
        if channel.members.alone:
            if failure is not None:
                raise failure
            tally = Tally.decode(Header(step, 0, presence, contributes).encode())
            return Round(step, time.perf_counter() - started, 0, len(collected.tensors), tally.contributors), tally
        cargo, whole = self._load(collected, channel)
        claim = Claim(step, presence, settings + self._travel(), whole.layout, failure, look=whole.look)
        try:
            begun = self._begin(claim, whole.tensors, contributes, channel)
            yield
            agreed, tally = yield from self._reduce(claim, whole.tensors, contributes, channel, begun, exact)
        except AveragingError as error:
            self._give_up(error)
            raise
        if presence is not Presence.LEAVING and tally.contributors:
            agreed.reduction.write(whole.tensors, tally.contributors)
            if cargo is not None:
                cargo.unload(collected.companions, tally.contributors)
        seconds = time.perf_counter() - started
        return Round(step, seconds, agreed.reduction.bytes, len(whole.tensors), tally.contributors), tally

    def line_up(self, step: int, settings: str) -> int:
        """The largest step that any rank is at. All ranks of the process set call it together."""
        if self._agreed is None:  # alone: nothing was ever agreed
            return step
        claim = Claim(step, Presence.JOINING, settings + self._travel(), self._agreed.layout)
        agreed = self._agreed
        return agree(claim, Channel(agreed.adapter, agreed.members, self.name, self.timeout, step, self.call)).step

    def _bucket_bytes(self, layout: Layout) -> int | None:
        return self.bucket_bytes

    def _travel(self) -> str:
        """What ranks must agree about besides the schedule, or their collectives would not meet."""
        return "" if self.bucket_bytes is None else f", bucket_bytes={self.bucket_bytes}"

    def _collect(self, params: object, presence: Presence) -> tuple[Collected, Exception | None]:
        if presence is Presence.LEAVING:
            return collect_or_explain(())
        collected, failure = collect_or_explain(
            params, known=self._known.get("params"), buffers=self.buffers, apart=self.apart
        )
        if collected.ignored and not (collected.tensors or collected.companions):
            warnings.warn(f"{self.name}: nothing to average, all parameters are frozen or integers.", stacklevel=4)
        self._know("params", collected)
        return collected, failure

    def _load(self, collected: Collected, channel: Channel) -> tuple[Cargo | None, Collected]:
        """The parameters, and what their companions travel in."""
        if not collected.companions:
            return None, collected
        from .cargo import Cargo

        if self._cargo is None or self._cargo[0] != channel.members:
            self._cargo = channel.members, Cargo(collected.adapter, channel.members)
        cargo = self._cargo[1]
        loaded = collect(cargo.load(collected.companions), everything=True, known=self._known.get("cargo"))
        self._know("cargo", loaded)
        return cargo, collected + loaded

    def _know(self, what: str, collected: Collected) -> None:
        self._known[what] = replace(collected, tensors=(), companions=())  # keeps no parameter alive

    def _channel(self, collected: Collected, step: int) -> Channel:
        if self._broken is not None:
            raise AveragingError(f"{self.name} cannot go on after an earlier error: {self._broken}")
        who = members(self.process_set, collected.adapter.hvd)
        return Channel(collected.adapter, who, self.name, self.timeout, step, self.call)

    def _begin(self, claim: Claim, tensors: Sequence[Any], contributes: bool, channel: Channel) -> Begun:
        """Begin to meet the other ranks, with all that can be sent before they are known to be there."""
        if self._agreed is None or self._agreed.members != channel.members:
            self._agreed = self._agree(claim, tensors, channel)
        agreed = self._agreed
        able = self._fits(claim, tensors, agreed)
        contributes = contributes and claim.presence is not Presence.LEAVING
        agreement = fingerprint(f"{claim.settings}|{agreed.layout.fingerprint}|{agreed.reduction.history}")
        header = Header(claim.step, agreement, claim.presence, contributes and able, able)
        # A rank whose parameters changed still meets the others in the buffers they know, with nothing but a flag.
        packed = tensors if header.contributes else None
        pending = channel.begin(lambda: agreed.reduction.start(packed, header.encode()))
        return Begun(agreed, pending, header.contributes)

    def _reduce(
        self,
        claim: Claim,
        tensors: Sequence[Any],
        contributes: bool,
        channel: Channel,
        begun: Begun,
        exact: bool = False,
    ) -> Meeting[tuple[Agreed, Tally]]:
        """Go on from ``begun``, with as much talk as it takes for every rank to be sure of every other."""
        while True:
            agreed, pending = begun.agreed, begun.pending
            tally = Tally.decode(channel.complete(pending))
            if tally.sound and tally.contributors:
                complete = tally.present == channel.members.size and not exact
                terms = Terms(begun.contributes, tally.contributors, complete)
                rest = channel.begin(partial(agreed.reduction.rest, tensors, terms))
                if rest is not None:
                    yield
                    channel.complete(rest, _OVERWRITTEN if agreed.reduction.overwrites else UNTOUCHED)
            if tally.sound or (tally.leaving == tally.present and tally.same_step):
                return agreed, tally
            self._agreed = self._agree(claim, tensors, channel)
            begun = self._begin(claim, tensors, contributes, channel)

    def _fits(self, claim: Claim, tensors: Sequence[Any], agreed: Agreed) -> bool:
        """Whether what this rank brings is what was agreed."""
        if claim.failure is not None or claim.presence is Presence.LEAVING:
            return claim.failure is None
        if claim.look is not None and claim.look is agreed.look:
            return True
        if claim.layout.fingerprint != agreed.layout.fingerprint:
            return False
        return self._basis(agreed.adapter, agreed.buckets, tensors) == agreed.basis

    def _basis(self, adapter: Adapter, buckets: Sequence[Bucket], tensors: Sequence[Any]) -> int:
        return adapter.memory(buckets, tensors)

    def _make_reduction(
        self,
        layout: Layout,
        buckets: Sequence[Bucket],
        tensors: Sequence[Any],
        name: str,
        channel: Channel,
        same_basis: bool,
    ) -> Reduction:
        if not same_basis and self.bucket_bytes is None:
            buckets = layout.buckets(channel.adapter.bucket_bytes(buckets), headers.LENGTH)
        return channel.adapter.reduction(buckets, tensors, name, channel.members, in_place=same_basis)

    def _agree(self, claim: Claim, tensors: Sequence[Any], channel: Channel) -> Agreed:
        buckets = claim.layout.buckets(self._bucket_bytes(claim.layout), headers.LENGTH)
        basis = self._basis(channel.adapter, buckets, tensors)
        known = self._agreed
        same = known is not None and known.layout.fingerprint == claim.layout.fingerprint
        if known is not None and same and known.basis and not basis:
            warnings.warn(
                f"{self.name}: the parameters no longer lie in one piece of memory (they were moved, converted or "
                "replaced), so they are packed again. Call flatten_parameters once more to avoid that.",
                stacklevel=6,
            )
        same_basis = agree(replace(claim, basis=basis), channel).same_basis
        # The layout is part of the name, so that the averagers of two models can share the averager's name.
        name = f"hvd_averaging.{self.name}.{claim.layout.fingerprint:016x}"
        reduction = self._make_reduction(claim.layout, buckets, tensors, name, channel, same_basis)
        return Agreed(channel.adapter, channel.members, claim.layout, buckets, basis, same_basis, reduction, claim.look)

    def _give_up(self, error: AveragingError) -> None:
        """After these the ranks no longer know of each other where they are."""
        if isinstance(error, AveragingTimeoutError):
            if self._agreed is not None:
                self._agreed.reduction.abandon()
            self._broken = str(error)  # the other ranks may still enter the round that this one has left
        elif isinstance(error, CollectiveError):
            self._agreed = None  # Horovod may be started again (elastic mode), with other ranks
