"""From how each rank fared in a test to the reports that the outer session gives of it."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import pytest
from _pytest._code.code import ReprFileLocation, TerminalRepr
from _pytest._io import TerminalWriter

from .team import Outcome, Report, State

Phase = Literal["setup", "call", "teardown"]
PHASES: tuple[Phase, ...] = ("setup", "call", "teardown")

# Makes a `pytest.TestReport` of a serialised one.
Revive = Callable[[Report], pytest.TestReport]
ByRank = Mapping[int, Sequence[pytest.TestReport]]
Sections = Sequence[tuple[str, str]]


class Failure(TerminalRepr):
    """What the outer session shows of a failure: a headline, then one part for each thing that there is to tell."""

    def __init__(self, item: pytest.Item, headline: str, parts: Sequence[tuple[str, object]], reason: str = "") -> None:
        self.headline = headline
        self.parts = parts
        path, line, _ = item.location
        # pytest's short summary and its JUnit file take their one line from here.
        self.reprcrash = ReprFileLocation(path, (line or 0) + 1, f"{reason} ({headline})" if reason else headline)

    def toterminal(self, tw: TerminalWriter) -> None:
        tw.line(self.headline, red=True, bold=True)
        for title, content in self.parts:
            tw.sep("-", title)
            if isinstance(content, TerminalRepr):
                content.toterminal(tw)
            else:
                tw.line(str(content).rstrip())


def reports(
    item: pytest.Item, outcomes: Sequence[Outcome], limit: float, launcher: str, revive: Revive
) -> Iterator[pytest.TestReport]:
    """The reports of one test, in the order in which pytest expects them."""
    answers = {outcome.rank: [revive(report) for report in outcome.reports] for outcome in outcomes}
    output = [(f"Captured stdout and stderr of rank {it.rank}", it.output) for it in outcomes if it.output.strip()]
    failed_phase = _failed_phase(outcomes, answers)
    for phase in PHASES:
        if phase == failed_phase:
            failure = _failure(item, outcomes, answers, limit, launcher)
            yield _report(item, phase, "failed", failure, _seconds(answers, phase), output)
            if phase != "teardown":
                yield _report(item, "teardown")
            return
        yield from _agreed(item, phase, answers, output)


def not_started(item: pytest.Item, headline: str, said: str) -> Iterator[pytest.TestReport]:
    yield _report(item, "setup", "failed", Failure(item, headline, [("what the ranks and their launcher wrote", said)]))
    yield _report(item, "teardown")


def skipped(item: pytest.Item, reason: str) -> Iterator[pytest.TestReport]:
    path, line, _ = item.location
    yield _report(item, "setup", "skipped", (path, (line or 0) + 1, f"Skipped: {reason}"))
    yield _report(item, "teardown")


def _failed_phase(outcomes: Sequence[Outcome], answers: ByRank) -> Phase | None:
    """The phase in which the test failed; to die, to outlive the limit or to skip alone is to fail in the call."""
    everything = [report for rank in answers for report in answers[rank]]
    for phase in PHASES:
        if any(report.failed and report.when == phase for report in everything):
            return phase
    lost = any(outcome.state in (State.DIED, State.OUTLIVED) for outcome in outcomes)
    split = len({outcome.skipped for outcome in outcomes}) > 1
    return "call" if lost or split else None


def _agreed(item: pytest.Item, phase: Phase, answers: ByRank, output: Sections) -> Iterator[pytest.TestReport]:
    """The report of a phase in which no rank failed: of the first rank that has more to say than that it passed."""
    here = [report for rank in answers for report in answers[rank] if report.when == phase]
    if not here:
        return
    spokesman = next((report for report in here if not report.passed), here[0])
    # A skip's place and reason come as a list, since JSON has no tuples.
    longrepr = tuple(spokesman.longrepr) if isinstance(spokesman.longrepr, list) else spokesman.longrepr
    sections = [*spokesman.sections, *output]
    report = _report(item, phase, spokesman.outcome, longrepr, _seconds(answers, phase), sections)
    report.user_properties = [(name, value) for name, value in spokesman.user_properties]
    if hasattr(spokesman, "wasxfail"):
        report.wasxfail = spokesman.wasxfail
    yield report


def _failure(item: pytest.Item, outcomes: Sequence[Outcome], answers: ByRank, limit: float, launcher: str) -> Failure:
    failed = {rank: report for rank in answers for report in answers[rank] if report.failed}
    parts: list[tuple[str, object]] = []
    for ranks, report in _alike(failed):
        parts.append((f"{_ranks(ranks)}: {report.when}", report.longrepr))
        parts.extend((f"{name} of {_ranks(ranks)}", text) for name, text in report.sections)
    stuck = (outcome for outcome in outcomes if outcome.state is State.OUTLIVED)
    parts.extend((f"rank {it.rank}: stacks at the limit", _without_pytest(it.stacks)) for it in stuck)
    if any(outcome.state is State.DIED for outcome in outcomes) and launcher.strip():
        parts.append(("what the launcher wrote", launcher))
    return Failure(item, _headline(outcomes, set(failed), limit), parts, _reason(failed))


def _reason(failed: Mapping[int, pytest.TestReport]) -> str:
    """One line of what went wrong on the first ranks that tell, such as ``rank 1: AssertionError: assert 1 == 0``."""
    for ranks, report in _alike(failed):
        if crash := getattr(report.longrepr, "reprcrash", None):
            return f"{_ranks(ranks)}: {crash.message.partition(chr(10))[0]}"
    return ""


def _without_pytest(stacks: str) -> str:
    """Each thread's stack down to the test or fixture; how pytest came there is always the same."""
    threads = (thread.splitlines() for thread in stacks.split("\n\n"))
    inner = ("\n".join(itertools.takewhile(lambda line: "/_pytest/" not in line, thread)) for thread in threads)
    return "\n\n".join(inner)


def _headline(outcomes: Sequence[Outcome], failed: set[int], limit: float) -> str:
    """Such as ``failed on rank 1 of 2, still running on rank 0 of 2``."""
    groups: dict[str, list[int]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.state is State.UNFINISHED):
        groups.setdefault(_fate(outcome, outcome.rank in failed, limit), []).append(outcome.rank)
    told = sorted(groups, key=lambda fate: fate == "passed")
    return ", ".join(f"{fate} on {_ranks(groups[fate])} of {len(outcomes)}" for fate in told)


def _fate(outcome: Outcome, failed: bool, limit: float) -> str:
    if outcome.state is State.DIED:
        return f"died ({_exit_words(outcome.exit_code)})"
    if outcome.state is State.OUTLIVED:
        return f"outlived its limit of {limit:g} s"
    if outcome.state is State.UNFINISHED:
        return "still running"
    return "failed" if failed else "skipped" if outcome.skipped else "passed"


def _exit_words(code: int | None) -> str:
    if code is None:
        return "its launcher did not say how"
    names = {128 + number: f", {number.name}" for number in signal.Signals}
    return f"exit code {code}{names.get(code, '')}"


def _alike(failed: Mapping[int, pytest.TestReport]) -> Iterator[tuple[list[int], pytest.TestReport]]:
    """Ranks that failed at the same place with the same words are told of once."""
    groups: dict[str, list[int]] = {}
    for rank, report in failed.items():
        # The whole traceback will not do: with pytest's list of arguments, it differs in `rank` at least.
        crash = getattr(report.longrepr, "reprcrash", None)
        groups.setdefault(str(crash or report.longrepr), []).append(rank)
    for ranks in groups.values():
        yield ranks, failed[ranks[0]]


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _seconds(answers: ByRank, phase: Phase) -> float:
    return max((report.duration for rank in answers for report in answers[rank] if report.when == phase), default=0.0)


def _report(
    item: pytest.Item,
    phase: Phase,
    outcome: Literal["passed", "failed", "skipped"] = "passed",
    longrepr: Failure | TerminalRepr | tuple[str, int, str] | object = None,
    seconds: float = 0.0,
    sections: Sections = (),
) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome=outcome,
        longrepr=longrepr,  # type: ignore[arg-type]
        when=phase,
        sections=sections,
        duration=seconds,
    )
