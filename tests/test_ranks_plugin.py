"""The plugin's own tests: sample test files, run in a pytest of their own, on real ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest
from ranks.launch import Launched, says_built
from ranks.world import places

TESTS = Path(__file__).parent

# In the environment of everything that a sample session starts, to see what is left of it.
MARK = "RANKS_PLUGIN_TEST"


@dataclass(frozen=True)
class Sample:
    """A sample session that has ended: how each test ended, by id, and all that was printed."""

    outcomes: dict[str, str]
    output: str
    seconds: float
    directory: Path

    def about(self, test: str) -> str:
        """What the session printed about one failed test."""
        heading = r"^_+ \S.* _+$|^=+ (?:ERRORS|FAILURES|short test summary info) "
        found = re.search(rf"^_+ {re.escape(test)} _+$(.*?)(?={heading})", self.output, re.M | re.S)
        assert found, f"nothing about {test} in:\n{self.output}"
        return found[1]


RunSample = Callable[..., Sample]


@pytest.fixture(scope="module")
def run_sample(tmp_path_factory: pytest.TempPathFactory) -> RunSample:
    def run(source: str, *options: str, directory: Path | None = None) -> Sample:
        directory = directory or tmp_path_factory.mktemp("sample")
        (directory / "test_it.py").write_text(textwrap.dedent(source))
        arguments = ["-m", "pytest", "-v", "-p", "ranks.plugin", "--rootdir=.", "--junitxml=junit.xml"]
        command = [sys.executable, *arguments, *options]
        env = {**os.environ, "PYTHONPATH": str(TESTS), MARK: str(directory), "COLUMNS": "200"}
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=directory, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
        )
        output = done.stdout + done.stderr
        lines = re.findall(r"^test_it\.py::(.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)", output, re.M)
        return Sample(dict(lines), output, time.monotonic() - began, directory)

    return run


def left_of(sample: Sample) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _environ(process).get(MARK) == str(sample.directory)]


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


@pytest.fixture(scope="module")
def mixed(run_sample: RunSample) -> Sample:
    """One session with a test of each fate, so that each start of ranks serves several checks."""
    return run_sample(
        """
        import os, subprocess, time
        import horovod.torch as hvd, pytest, torch

        @pytest.mark.ranks(2, 3, backends=("gloo",))
        @pytest.mark.parametrize("factor", [1, 10])
        def test_sum(rank, size, factor):
            total = hvd.allreduce(torch.tensor(factor * rank), op=hvd.Sum, name="total")
            assert hvd.size() == size and int(total) == factor * sum(range(size))

        @pytest.mark.ranks(2)
        def test_backend(request):
            assert hvd.mpi_enabled() == request.node.name.endswith("-mpi]")

        @pytest.mark.ranks(2, backends=("gloo",))
        def test_slow_on_1(rank, ranks_tmp_path):
            time.sleep(0.5 * rank)
            (ranks_tmp_path.parent / f"done-{rank}").touch()

        @pytest.mark.ranks(2, backends=("gloo",))
        def test_lined_up(ranks_tmp_path):
            assert (ranks_tmp_path.parent / "done-1").exists()

        @pytest.mark.ranks(2, backends=("gloo",))
        def test_skipped_by_all():
            pytest.skip("nothing to see")

        @pytest.mark.ranks(2, backends=("gloo",))
        def test_shared_path(rank, ranks_tmp_path, tmp_path):
            assert tmp_path != ranks_tmp_path
            if rank == 0:
                (ranks_tmp_path / "from-0").write_text("x")
            hvd.allreduce(torch.zeros(1), name="written")
            assert (ranks_tmp_path / "from-0").exists()

        @pytest.mark.ranks(2, backends=("gloo",))
        def test_wrong_on_1(rank):
            print(f"printed by {rank}", flush=True)
            assert rank == 0, "rank one is wrong"

        @pytest.mark.ranks(2)
        def test_exits(rank):
            os.write(2, b"last words")
            if rank == 1:
                os._exit(3)
            time.sleep(60)

        @pytest.mark.ranks(2, backends=("gloo",), limit=2)
        def test_stalls(rank):
            subprocess.Popen(["sleep", "600"], start_new_session=True)
            if rank == 1:
                hvd.allreduce(torch.zeros(1), name="lonely")

        @pytest.mark.ranks(2, backends=("gloo",))
        def test_skipped_by_one(rank):
            if rank == 0:
                pytest.skip("not here")

        @pytest.mark.ranks(2, backends=("gloo",))
        def test_last(rank):
            assert hvd.allgather(torch.tensor([rank]), name="ranks").tolist() == [0, 1]

        @pytest.mark.ranks(2, backends=("gloo",))
        @pytest.mark.xfail(reason="known")
        def test_expected_failure():
            assert False

        @pytest.mark.ranks(2, backends=("gloo",), env={"RANKS_SAMPLE": "set"})
        def test_environment():
            assert os.environ["RANKS_SAMPLE"] == "set"

        def test_ordinary():
            assert "RANKS_SAMPLE" not in os.environ

        def test_needs_ranks(rank):
            pass
        """
    )


def test_each_place_is_an_item_of_its_own(mixed: Sample) -> None:
    passed = {test for test, outcome in mixed.outcomes.items() if outcome == "PASSED" and test.startswith("test_sum")}
    assert passed == {f"test_sum[{factor}-np{np}-gloo]" for factor in (1, 10) for np in (2, 3)}


PASSING = [f"{name}[np2-gloo]" for name in ("backend", "lined_up", "shared_path", "environment")] + ["backend[np2-mpi]"]


@pytest.mark.parametrize("test", PASSING)
def test_passes(mixed: Sample, test: str) -> None:
    assert mixed.outcomes[f"test_{test}"] == "PASSED"


def test_ordinary_tests_stay_ordinary(mixed: Sample) -> None:
    assert mixed.outcomes["test_ordinary"] == "PASSED"
    assert mixed.outcomes["test_needs_ranks"] == "ERROR"
    assert "only tests marked with @pytest.mark.ranks run on ranks" in mixed.output


def test_one_failing_rank_fails_the_test(mixed: Sample) -> None:
    assert mixed.outcomes["test_wrong_on_1[np2-gloo]"] == "FAILED"
    told = mixed.about("test_wrong_on_1[np2-gloo]")
    assert "failed on rank 1 of 2, passed on rank 0 of 2" in told
    assert "AssertionError: rank one is wrong" in told
    assert 'assert rank == 0, "rank one is wrong"' in told, "the traceback shows the source"
    assert "printed by 0" in told
    assert "printed by 1" in told
    assert re.search(r"^FAILED \S+ - rank 1: AssertionError: rank one is wrong", mixed.output, re.M)


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_dead_rank_is_named(mixed: Sample, backend: str) -> None:
    assert mixed.outcomes[f"test_exits[np2-{backend}]"] == "FAILED"
    told = mixed.about(f"test_exits[np2-{backend}]")
    assert "died (exit code 3) on rank 1 of 2, still running on rank 0 of 2" in told
    assert "last words" in told


def test_stall_ends_at_its_limit_with_stacks(mixed: Sample) -> None:
    assert mixed.outcomes["test_stalls[np2-gloo]"] == "FAILED"
    told = mixed.about("test_stalls[np2-gloo]")
    assert "outlived its limit of 2 s on rank 1 of 2, passed on rank 0 of 2" in told
    assert re.search(r'File ".*horovod/torch/mpi_ops\.py", line \d+ in synchronize', told)
    assert re.search(r'File ".*test_it\.py", line \d+ in test_stalls', told)


def test_skips(mixed: Sample) -> None:
    assert mixed.outcomes["test_skipped_by_all[np2-gloo]"] == "SKIPPED"
    assert "nothing to see" in mixed.output
    assert mixed.outcomes["test_skipped_by_one[np2-gloo]"] == "FAILED"
    assert "skipped on rank 0 of 2, passed on rank 1 of 2" in mixed.about("test_skipped_by_one[np2-gloo]")


def test_expected_failure(mixed: Sample) -> None:
    assert mixed.outcomes["test_expected_failure[np2-gloo]"] == "XFAIL"


def test_the_rest_goes_on_after_a_failure(mixed: Sample) -> None:
    assert mixed.outcomes["test_last[np2-gloo]"] == "PASSED"


def test_nothing_is_left_running(mixed: Sample) -> None:
    assert left_of(mixed) == []


def test_junit_has_every_item(mixed: Sample) -> None:
    cases = ElementTree.parse(mixed.directory / "junit.xml").iter("testcase")
    failed = {case.get("name") for case in cases if case.find("failure") is not None}
    assert failed == {test for test, outcome in mixed.outcomes.items() if outcome == "FAILED"}


def test_world_that_does_not_start_is_tried_once(run_sample: RunSample) -> None:
    sample = run_sample(
        """
        import os, pytest

        if "RANKS_LAUNCH_ID" in os.environ:
            with open("started", "a") as log:
                log.write("x")
            raise RuntimeError("no such luck")

        @pytest.mark.ranks(2, backends=("gloo",))
        @pytest.mark.parametrize("number", range(5))
        def test_never(number):
            pass
        """
    )
    assert sample.outcomes == {f"test_never[{number}-np2-gloo]": "ERROR" for number in range(5)}
    assert len((sample.directory / "started").read_text()) <= 2, "one launch of two ranks"
    assert "np=2 gloo torch did not start" in sample.output
    assert "RuntimeError: no such luck" in sample.output
    assert "no such luck" not in sample.about("ERROR at setup of test_never[4-np2-gloo]"), "told once is enough"
    assert left_of(sample) == []


def test_stops_at_the_first_failure_and_finds_it_again(run_sample: RunSample) -> None:
    source = """
        import pytest, time

        @pytest.mark.ranks(2, backends=("gloo",))
        def test_good(): pass

        @pytest.mark.ranks(2, backends=("gloo",))
        def test_bad(rank, size):
            assert False, "both are wrong"

        @pytest.mark.ranks(2, backends=("gloo",))
        def test_unreached(): pass
        """
    sample = run_sample(source, "-x")
    assert sample.outcomes == {"test_good[np2-gloo]": "PASSED", "test_bad[np2-gloo]": "FAILED"}
    told = sample.about("test_bad[np2-gloo]")
    assert "failed on ranks 0, 1 of 2" in told
    assert told.count("AssertionError: both are wrong") == 1, "what all ranks say alike is told once"
    again = run_sample(source, "--lf", "--collect-only", directory=sample.directory)
    assert re.findall(r"<Function (.*)>", again.output) == ["test_bad[np2-gloo]"]


def test_collection(run_sample: RunSample) -> None:
    source = """
        import pytest

        @pytest.mark.ranks(2, 4)
        def test_one(): pass

        @pytest.mark.ranks(4, backends=("mpi",), framework="tensorflow", limit=5)
        def test_two(): pass

        @pytest.mark.ranks(2)
        def test_three(): pass

        def test_plain(): pass
        """
    listed = re.findall(r"<Function (.*)>", run_sample(source, "--collect-only").output)
    assert listed == [
        *["test_plain", "test_one[np2-gloo]", "test_three[np2-gloo]", "test_one[np2-mpi]", "test_three[np2-mpi]"],
        *["test_one[np4-gloo]", "test_one[np4-mpi]", "test_two[np4-mpi]"],
    ]
    gloo = re.findall(r"<Function (.*)>", run_sample(source, "--collect-only", "--backend=gloo", "-k", "np2").output)
    assert gloo == ["test_one[np2-gloo]", "test_three[np2-gloo]"]


@pytest.mark.parametrize(
    ("marker", "words"),
    [
        (pytest.mark.ranks(), "numbers of ranks"),
        (pytest.mark.ranks(0), "numbers of ranks"),
        (pytest.mark.ranks(2, backends="gloo"), "backends wants a tuple"),
        (pytest.mark.ranks(2, backends=("nccl",)), "backends wants a tuple"),
        (pytest.mark.ranks(2, framework="jax"), "framework wants one of"),
        (pytest.mark.ranks(2, limit=0), "limit wants a positive number"),
        (pytest.mark.ranks(2, timeout=3), "timeout"),
    ],
)
def test_senseless_marker(marker: pytest.MarkDecorator, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        places(marker.mark)


def test_horovodrun_returns_code_and_output(horovodrun: Callable[..., Launched]) -> None:
    script = """if True:
        import os, sys
        print("out", os.environ["HOROVOD_RANK"], sys.argv[1], os.environ["RANKS_SAMPLE"])
        sys.exit("err")
    """
    launched = horovodrun(2, script, args=["argument"], env={"RANKS_SAMPLE": "set"})
    assert launched.returncode == 1
    assert not launched.timed_out
    assert "err" in launched.output
    assert re.search(r"out [01] argument set", launched.output)


def test_horovodrun_kills_at_the_limit(horovodrun: Callable[..., Launched], tmp_path: Path) -> None:
    script = """if True:
        import os, signal, subprocess, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        print("begun", flush=True)
        time.sleep(600)
    """
    launched = horovodrun(2, script, limit=7, env={MARK: str(tmp_path)})
    assert launched.timed_out
    assert launched.output.count("begun") == 2
    assert launched.seconds < 40
    assert left_of(Sample({}, "", 0.0, tmp_path)) == []


def test_what_check_build_says() -> None:
    words = """Horovod v0.28.1:

    Available Controllers:
        [ ] MPI
        [X] Gloo

    Available Tensor Operations:
        [X] MPI
        [ ] Gloo
    """
    assert says_built(words, "gloo")
    assert not says_built(words, "mpi")
