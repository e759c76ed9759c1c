"""The pytest plugin itself: marker, option and fixtures, and the outer session that has marked tests run on ranks.

    @pytest.mark.ranks(2, 4, backends=("gloo", "mpi"), limit=30, framework="torch", env={"HOROVOD_CYCLE_TIME": "5"})
    def test_sum(rank, size): ...

is one item per size and backend, such as ``test_sum[np2-gloo]``. The body runs on every rank, with Horovod initialised.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from . import launch, verdict
from .rank import RankSession
from .team import StartError, Team
from .world import BACKENDS, PLACE, Place, World, place_of, places

MARKER = (
    "ranks(*sizes, backends=('gloo', 'mpi'), limit=30, framework='torch', env=None): run the test on that many ranks"
)

# The ranks of the next world import what they need while the last so many tests of this one run; not earlier, since
# ranks that wait take some of the processors, too.
LAST_TESTS = 60

HorovodRun = Callable[..., launch.Launched]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ranks", "tests under horovodrun")
    group.addoption("--backend", choices=BACKENDS, help="run tests marked with ranks on this backend only")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    if _rank_session(config) is None:
        config.pluginmanager.register(OuterSession(config), "ranks-outer-session")


@pytest.hookimpl(trylast=True)  # so that the place comes last in the test's id
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    try:
        wanted = places(marker)
    except (TypeError, ValueError) as error:
        pytest.fail(f"{metafunc.definition.nodeid}: @pytest.mark.ranks: {error}", pytrace=False)
    metafunc.fixturenames.append(PLACE)
    metafunc.parametrize(PLACE, wanted, ids=[place.id for place in wanted], indirect=True)


@pytest.fixture(name=PLACE)
def _place(request: pytest.FixtureRequest) -> Place:
    place: Place = request.param
    return place


@pytest.fixture(scope="session")
def rank(request: pytest.FixtureRequest) -> int:
    """This process's rank in the world."""
    return _needed_rank_session(request).rank


@pytest.fixture(scope="session")
def size(request: pytest.FixtureRequest) -> int:
    """The number of ranks in the world."""
    return _needed_rank_session(request).size


@pytest.fixture
def ranks_tmp_path(request: pytest.FixtureRequest) -> Path:
    """A directory of this test that all its ranks share (``tmp_path`` is each rank's own)."""
    path = _needed_rank_session(request).shared_path
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture
def horovodrun(tmp_path: Path) -> HorovodRun:
    """For ordinary tests of how a job ends: run a script, given as text or path, under a ``horovodrun`` of its own.

    ``horovodrun(np, script, backend="gloo", limit=60, env=None, args=(), framework="torch")`` returns a `Launched`, all
    processes gone. A launch for PyTorch finds no TensorFlow.
    """
    numbers = itertools.count()

    def run(
        np: int,
        script: str | Path,
        backend: str = "gloo",
        limit: float = 60.0,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        framework: str = "torch",
    ) -> launch.Launched:
        directory = tmp_path / f"horovodrun-{next(numbers)}"
        directory.mkdir()
        if isinstance(script, str):
            (directory / "script.py").write_text(script)
            script = directory / "script.py"
        launched = launch.run_python(np, [str(script), *args], directory / "launch.log", backend, limit, env, framework)
        if launch.lacks(backend, launched.output):
            pytest.skip(_not_built(backend))
        return launched

    return run


class OuterSession:
    """Runs marked tests on ranks, one launch at a time, and leaves all others to pytest."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self._items: list[pytest.Item] = []
        self._positions: dict[pytest.Item, int] = {}
        self._team: Team | None = None
        self._next_team: Team | None = None
        self._closer = ThreadPoolExecutor(1)
        self._closing: list[Future[None]] = []
        self._unstartable: dict[World, StartError] = {}
        self._skips: dict[str, int] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._restrict(items)
        # Ordinary tests first, then all tests of one world together, in the order in which the worlds first appear.
        order: dict[World | None, int] = {None: 0}
        for world in map(_world, items):
            order.setdefault(world, len(order))
        items.sort(key=lambda item: order[_world(item)])

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._items = session.items
        self._positions = {item: position for position, item in enumerate(session.items)}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        place = place_of(item)
        if place is None:
            return None
        # pytest set nothing up for this item, but may have left the fixtures of the last ordinary one for it.
        item.session._setupstate.teardown_exact(nextitem)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._run(item, place, nextitem):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_sessionfinish(self) -> None:
        self._end_team()
        if self._next_team is not None:
            self._next_team.close()
        for closed in self._closing:
            closed.result()
        self._closer.shutdown()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for backend, count in self._skips.items():
            terminalreporter.write_line(f"{_not_built(backend)}: {count} tests skipped", red=True, bold=True)

    def _restrict(self, items: list[pytest.Item]) -> None:
        """Deselect what ``--backend`` leaves out."""
        backend = self.config.getoption("backend")
        left_out = [item for item in items if backend and (world := _world(item)) and world.backend != backend]
        if left_out:
            self.config.hook.pytest_deselected(items=left_out)
            gone = set(left_out)
            items[:] = [item for item in items if item not in gone]

    def _run(self, item: pytest.Item, place: Place, nextitem: pytest.Item | None) -> Iterable[pytest.TestReport]:
        world = place.world
        following = nextitem.nodeid if nextitem and _world(nextitem) == world else None
        began = time.monotonic()
        try:
            team = self._team_of(world)
        except StartError as error:
            return self._explain(item, world, error)
        start_seconds = time.monotonic() - began
        self._look_ahead(item)
        outcomes = team.run(item.nodeid, following, place.limit)
        reports = list(verdict.reports(item, outcomes, place.limit, team.launcher_news(), self._revive))
        reports[0].duration += start_seconds  # it is a set-up that the tests of a world share
        if team.over or following is None:
            self._end_team()
        return reports

    def _team_of(self, world: World) -> Team:
        """The team that is there, if it fits; else a new one. A world that did not start once is not tried again."""
        if self._team is not None and self._team.world == world:
            return self._team
        self._end_team()
        if world in self._unstartable:
            raise self._unstartable[world]
        team, self._next_team = self._next_team, None
        if team is not None and team.world != world:  # this one is in the way of another world that ended too early
            self._next_team, team = team, None
        team = team or Team(world, self._arguments(world))
        team.meet()
        self._team = team
        return team

    def _look_ahead(self, item: pytest.Item) -> None:
        """Start the next world's ranks if few tests of this one are left."""
        ahead = self._items[self._positions[item] + 1 :][:LAST_TESTS]
        following = next((world for world in map(_world, ahead) if world not in (None, _world(item))), None)
        if following is not None and self._next_team is None and following not in self._unstartable:
            self._next_team = Team(following, self._arguments(following))

    def _end_team(self) -> None:
        team, self._team = self._team, None
        if team is not None:  # Open MPI's launcher takes seconds to end
            self._closing.append(self._closer.submit(team.close))

    def _explain(self, item: pytest.Item, world: World, error: StartError) -> Iterable[pytest.TestReport]:
        """Only Horovod's own word that it lacks the backend makes a failed start a skip."""
        told_before = world in self._unstartable
        self._unstartable[world] = error
        if not launch.lacks(world.backend, error.said):
            return verdict.not_started(item, error.headline, "(see the first such test)" if told_before else error.said)
        self._skips[world.backend] = self._skips.get(world.backend, 0) + 1
        return verdict.skipped(item, _not_built(world.backend))

    def _arguments(self, world: World) -> list[str]:
        """pytest's arguments in the ranks: the files, and what makes their collection, ids and tracebacks like ours."""
        option = self.config.option
        arguments = [
            f"--rootdir={self.config.rootpath}",
            f"--import-mode={option.importmode}",
            f"--tb={option.tbstyle}",
        ]
        arguments += ["-c", str(self.config.inipath)] if self.config.inipath else []
        arguments += [f"--confcutdir={option.confcutdir}"] if option.confcutdir else []
        arguments += ["-v"] * option.verbose + ["--showlocals"] * option.showlocals
        # What the ini file adds for the outer session, such as reports to write, is not for each rank.
        for name, values in {
            "-p": [__name__, *option.plugins],
            "-W": option.pythonwarnings or [],
            "-o": [*(option.override_ini or []), "addopts="],
        }.items():
            arguments += itertools.chain.from_iterable((name, value) for value in values)
        return arguments + sorted({str(item.path) for item in self._items if _world(item) == world})

    def _revive(self, report: dict[str, Any]) -> pytest.TestReport:
        revived: pytest.TestReport = self.config.hook.pytest_report_from_serializable(config=self.config, data=report)
        return revived


def _world(item: pytest.Item) -> World | None:
    place = place_of(item)
    return place.world if place else None


def _rank_session(config: pytest.Config) -> RankSession | None:
    found = (plugin for plugin in config.pluginmanager.get_plugins() if isinstance(plugin, RankSession))
    return next(found, None)


def _needed_rank_session(request: pytest.FixtureRequest) -> RankSession:
    session = _rank_session(request.config)
    if session is None:
        pytest.fail("only tests marked with @pytest.mark.ranks run on ranks", pytrace=False)
    return session


def _not_built(backend: str) -> str:
    return f"HOROVOD WAS BUILT WITHOUT {backend.upper()} (horovodrun --check-build)"
