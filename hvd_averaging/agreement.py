"""What the ranks agree about before they average, and who differs when they do not.

All ranks see the same claims and so come to the same verdict: either every rank goes on, or every rank raises, and
nothing has been changed. The cheap comparison is one exchange of a few numbers; names are exchanged only for a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .channel import Channel
from .errors import LayoutMismatchError, PeerError, StepMismatchError, list_of_ranks
from .header import Presence
from .layout import Layout, fingerprint

_PRESENCES = tuple(Presence)


@dataclass(frozen=True)
class Claim:
    """What one rank brings to the agreement.

    ``settings`` describes the averager (class, schedule, name); ``basis`` is a hash of what a shorter way to average
    rests on (how the tensors lie in memory, or the anchor), 0 without one; ``failure`` is why this rank cannot take
    part; ``look`` stays the same object while all parameters are where they were.
    """

    step: int
    presence: Presence
    settings: str
    layout: Layout
    failure: Exception | None = None
    basis: int = 0
    look: object = None

    def encode(self) -> list[int]:
        return [
            self.step,
            _PRESENCES.index(self.presence),
            self.failure is not None,
            len(self.layout.entries),
            self.layout.fingerprint,
            fingerprint(self.settings),
            self.basis,
        ]


@dataclass(frozen=True)
class Agreement:
    """What all ranks found out together.

    ``step`` is the largest that any rank has reached (ranks that join may be behind); ``same_basis`` whether all ranks
    have a basis, and the same one.
    """

    step: int
    same_basis: bool


@dataclass(frozen=True)
class _Row:
    step: int
    presence: Presence
    failed: bool
    entries: int
    layout: int
    settings: int
    basis: int


def agree(claim: Claim, channel: Channel) -> Agreement:
    """Compare the claims of all ranks.

    Raises:
        LayoutMismatchError, StepMismatchError: the ranks differ; raised on every rank, naming the difference.
        PeerError: another rank could not take part; the rank itself raises its own ``claim.failure``.
    """
    rows = {
        rank: _Row(step, _PRESENCES[presence], bool(failed), *rest)
        for rank, (step, presence, failed, *rest) in channel.gather(claim.encode(), "agree").items()
    }
    _check_failures(rows, claim, channel)
    _check_settings(rows, claim, channel)
    _check_leaving(rows, channel)
    _check_layouts(rows, claim, channel)
    _check_steps(rows, channel)
    same_basis = _equal(row.basis for row in rows.values()) and claim.basis != 0
    return Agreement(max(row.step for row in rows.values()), same_basis)


def _check_failures(rows: Mapping[int, _Row], claim: Claim, channel: Channel) -> None:
    if claim.failure is not None:
        raise claim.failure
    failed = [rank for rank, row in rows.items() if row.failed]
    if failed:
        raise PeerError(
            f"{channel.where}: {list_of_ranks(failed)} could not take part in this round, see the error in the log "
            "there. The parameters here are as they were."
        )


def _check_settings(rows: Mapping[int, _Row], claim: Claim, channel: Channel) -> None:
    if _equal(row.settings for row in rows.values()):
        return
    settings = channel.gather_text(claim.settings, "settings")
    raise LayoutMismatchError(
        f"{channel.where}: the averagers are set up differently: {_who_has_what(settings)}. Make them with the same "
        "arguments, in the same order, on every rank."
    )


def _check_leaving(rows: Mapping[int, _Row], channel: Channel) -> None:
    leaving = {rank: row.step for rank, row in rows.items() if row.presence is Presence.LEAVING}
    if leaving and len(leaving) < len(rows):
        # A round comes with a step, which is counted once the round is done.
        staying = {rank: row.step + 1 for rank, row in rows.items() if rank not in leaving}
        raise StepMismatchError(
            f"{channel.where}: {_steps(leaving, '{} left the averager after {} steps')}, while "
            f"{_steps(staying, '{} entered a round with {} steps')}. {_advice(channel)}"
        )


def _check_layouts(rows: Mapping[int, _Row], claim: Claim, channel: Channel) -> None:
    if _equal(row.layout for row in rows.values()):
        return
    most = max(row.entries for row in rows.values())
    own = [entry.fingerprint for entry in claim.layout.entries]
    fingerprints = channel.gather([*own, *[0] * (most - len(own))], f"fingerprints.{most}")
    differing = (number for number in range(most) if not _equal(prints[number] for prints in fingerprints.values()))
    number = next(differing, 0)
    entry = str(claim.layout.entries[number]) if number < len(own) else f"none (it passed {len(own)} parameters)"
    raise LayoutMismatchError(
        f"{channel.where}: the ranks passed different parameters; the first difference is parameter number {number}: "
        f"{_who_has_what(channel.gather_text(entry, 'entry'))}. Pass the same parameters in the same order on every "
        "rank. Nothing was changed."
    )


def _check_steps(rows: Mapping[int, _Row], channel: Channel) -> None:
    steps = {rank: row.step for rank, row in rows.items() if row.presence is not Presence.JOINING}
    if not _equal(steps.values()):
        raise StepMismatchError(
            f"{channel.where}: the ranks met at different steps: {_steps(steps, '{} at step {}')}. {_advice(channel)}"
        )


def _advice(channel: Channel) -> str:
    return f"{channel.advice} A checkpoint must be loaded on every rank. Nothing was changed."


def _equal(values: Iterable[int]) -> bool:
    return len(set(values)) <= 1


def _who_has_what(texts: Mapping[int, str]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_of.setdefault(text, []).append(rank)
    return "; ".join(f"{list_of_ranks(ranks)}: {text}" for text, ranks in ranks_of.items())


def _steps(steps: Mapping[int, int], phrase: str) -> str:
    ranks_at: dict[int, list[int]] = {}
    for rank, step in steps.items():
        ranks_at.setdefault(step, []).append(rank)
    return ", ".join(phrase.format(list_of_ranks(ranks), step) for step, ranks in sorted(ranks_at.items()))
