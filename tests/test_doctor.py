"""`hvd-averaging doctor` on set-ups that are broken on purpose, and on one that works.

Broken ones are an empty virtual environment, with stubs of what is wanted on PYTHONPATH: what the doctor imports, runs
and reads is real, and only the packages are not.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from hvd_averaging.cli import frameworks, hosts, launching

ROOT = Path(__file__).resolve().parents[1]

TORCH = """
__version__ = "2.13.0"
class version: cuda = None
class cuda: is_available = staticmethod(lambda: False)
"""
TENSORFLOW = """
__version__ = "2.21.0"
class config: list_physical_devices = staticmethod(lambda kind: [])
"""
KERAS = """
__version__ = "{}"
class backend: backend = staticmethod(lambda: "{}")
"""
HALF = """
init = None
gloo_built, mpi_built, nccl_built = lambda: {}, lambda: {}, lambda: 0
"""
GLOO, GLOO_AND_MPI = HALF.format(True, False), HALF.format(True, True)
WITHOUT_TENSORFLOW = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "tensorflow" else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""
# As Horovod itself leaves them, compiled without the framework.
NO_TORCH_HALF = 'print("Warning! MPI libs are missing, but python applications are still available.")'
NO_TENSORFLOW_HALF = 'raise ImportError("Extension horovod.tensorflow has not been built: mpi_lib.so not found")'


@dataclass(frozen=True)
class Diagnosis:
    status: int
    findings: list[dict[str, str]]

    def __getitem__(self, about: str) -> dict[str, str]:
        (finding,) = (finding for finding in self.findings if finding["about"] == about)
        return finding

    def level(self, about: str) -> str:
        return self[about]["level"]

    @property
    def errors(self) -> list[str]:
        return [finding["about"] for finding in self.findings if finding["level"] == "error"]


class Setup:
    """An empty environment, what was put into it, and what the doctor says of it."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.packages, self.programs = python, folder / "packages", folder / "programs"
        self.packages.mkdir()
        self.programs.mkdir()
        self.paths = [self.packages, ROOT]

    def package(self, name: str, text: str = "") -> None:
        path = self.packages.joinpath(*name.split("."))
        path.mkdir(parents=True)
        (path / "__init__.py").write_text(text)

    def working(self) -> Setup:
        """With PyTorch, and a Horovod for it."""
        self.package("torch", TORCH)
        self.package("horovod")
        self.package("horovod.torch", GLOO_AND_MPI)
        self.program("mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
        return self

    def program(self, name: str, text: str) -> None:
        (self.programs / name).write_text("#!/bin/sh\n" + text)
        (self.programs / name).chmod(0o755)

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.programs), "PYTHONPATH": os.pathsep.join(map(str, self.paths)), **variables}
        command = [str(self.python), "-m", "hvd_averaging.cli", *arguments]
        return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=60)

    def doctor(self, *arguments: str, **variables: str) -> Diagnosis:
        return diagnosis(self.run("doctor", "--json", *arguments, **variables))


def diagnosis(done: subprocess.CompletedProcess[str]) -> Diagnosis:
    assert done.stderr == "", done.stderr
    told = json.loads(done.stdout)
    assert told["works"] == (done.returncode == 0)
    return Diagnosis(done.returncode, told["findings"])


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a virtual environment with nothing but a program called horovodrun."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=False)
    (folder / "bin" / "horovodrun").touch(0o755)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def extra(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the extra [cli] installs, and nothing else."""
    folder = tmp_path_factory.mktemp("extra")
    for name in ("click", "rich", "pygments", "markdown_it", "mdurl"):
        spec = find_spec(name)
        assert spec and spec.origin
        (folder / name).symlink_to(Path(spec.origin).parent)
    return folder


@pytest.fixture
def bare(empty: Path, tmp_path: Path) -> Setup:
    """Without the extra [cli]."""
    return Setup(empty, tmp_path)


@pytest.fixture
def setup(bare: Setup, extra: Path) -> Setup:
    bare.paths.append(extra)
    return bare


class TestBrokenSetups:
    def test_nothing_is_installed(self, setup: Setup) -> None:
        done = setup.run("doctor")
        assert done.returncode == 1 and done.stderr == ""
        assert "neither PyTorch nor TensorFlow is installed" in done.stdout
        assert "-> hvd-averaging build-horovod" in done.stdout and "2 errors" in done.stdout
        assert max(len(line) for line in done.stdout.splitlines()) <= 80 and "\x1b" not in done.stdout

    def test_no_horovod(self, setup: Setup) -> None:
        setup.package("torch", TORCH)
        seen = setup.doctor()
        assert seen.status == 1 and seen.errors == ["Horovod"]
        assert seen["Horovod"]["what"] == "not installed" and "build-horovod" in seen["Horovod"]["remedy"]

    def test_a_setup_that_works(self, setup: Setup) -> None:
        seen = setup.working().doctor()
        assert seen.status == 0 and seen.errors == []
        assert {seen.level(about) for about in ("PyTorch", "Horovod", "Horovod, PyTorch", "Gloo", "MPI")} == {"ok"}
        assert seen.level("TensorFlow") == seen.level("NCCL") == "note"

    @pytest.mark.parametrize("needs", [[], ["--need", "torch"]])
    def test_horovod_without_torch(self, setup: Setup, needs: list[str]) -> None:
        setup.package("torch", TORCH)
        setup.package("tensorflow", TENSORFLOW)
        setup.package("horovod")
        setup.package("horovod.torch", NO_TORCH_HALF)
        setup.package("horovod.tensorflow", GLOO)
        seen = setup.doctor(*needs)
        assert "compiled without PyTorch" in seen["Horovod, PyTorch"]["what"]
        assert seen.level("Horovod, TensorFlow") == "ok"
        assert seen.errors == (["Horovod, PyTorch"] if needs else [])

    def test_horovod_without_the_only_framework(self, setup: Setup) -> None:
        setup.package("tensorflow", TENSORFLOW)
        setup.package("horovod")
        setup.package("horovod.tensorflow", NO_TENSORFLOW_HALF)
        seen = setup.doctor()
        assert "does not work with any framework" in str(seen.findings)
        assert "compiled without TensorFlow" in seen["Horovod, TensorFlow"]["what"] and seen.status == 1

    def test_horovod_compiled_for_another_torch(self, setup: Setup) -> None:
        setup.package("torch", TORCH)
        setup.package("horovod")
        setup.package("horovod.torch", 'raise ImportError("mpi_lib_v2.so: undefined symbol: _ZN3c10")')
        (setup.packages / "horovod" / "metadata.json").write_text('{"pytorch": "2.12.1"}')
        seen = setup.doctor()
        said = seen["Horovod, PyTorch"]
        assert said["level"] == "error" and "--force" in said["remedy"]
        assert all(words in said["what"] for words in ("2.12.1", "2.13.0", "undefined symbol"))

    def test_horovod_that_happens_to_load(self, setup: Setup) -> None:
        (setup.working().packages / "horovod" / "metadata.json").write_text('{"pytorch": "2.12.1"}')
        said = setup.doctor()["Horovod, PyTorch"]
        assert said["level"] == "warning" and "2.12.1" in said["what"] and "luck" in said["what"]

    @pytest.mark.parametrize("needs", [[], ["--need", "mpi"]])
    def test_no_mpirun(self, setup: Setup, needs: list[str]) -> None:
        (setup.working().programs / "mpirun").unlink()
        seen = setup.doctor(*needs)
        assert seen.level("mpirun") == ("error" if needs else "warning") and seen.status == len(needs) // 2
        assert "openmpi-bin" in seen["mpirun"]["remedy"] and "--gloo" in seen["mpirun"]["remedy"]

    @pytest.mark.parametrize(
        ("version", "backend", "words"),
        [("2.15.0", "tensorflow", "wrong Keras"), ("3.15.1", "jax", "there is no Horovod")],
    )
    def test_wrong_keras(self, setup: Setup, version: str, backend: str, words: str) -> None:
        setup.working().package("keras", KERAS.format(version, backend))
        seen = setup.doctor("--need", "keras")
        assert seen.errors == ["Keras"] and words in seen["Keras"]["what"]
        assert ("Horovod's Keras" in str(seen.findings)) == version.startswith("3")

    def test_an_import_that_crashes(self, setup: Setup) -> None:
        setup.package("torch", "import os; os.abort()")
        seen = setup.doctor()
        assert "crashed with SIGABRT" in seen["PyTorch"]["what"] and seen.level("PyTorch") == "error"

    def test_an_import_that_hangs(self, setup: Setup) -> None:
        setup.package("tensorflow", "import time; print('{', flush=True); time.sleep(600)")
        seen = setup.doctor("--limit", "1")
        assert "did not end within 1 seconds" in seen["TensorFlow"]["what"] and seen.level("TensorFlow") == "error"


class TestLaunch:
    def test_plain_python(self, setup: Setup) -> None:
        setup.working()
        assert setup.doctor().level("this process") == "note"
        seen = setup.doctor("--need", "launch")
        assert seen.errors == ["this process"] and "plain Python" in seen["this process"]["what"]
        assert "horovodrun -np 4" in seen["this process"]["remedy"]

    def test_rank_0_speaks_for_all(self, setup: Setup) -> None:
        setup.working()
        ranks = [{"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "2"} for rank in range(2)]
        seen = setup.doctor("--need", "launch", "--smoke", **ranks[0])
        assert seen["this process"]["what"] == "rank 0 of 2, started by horovodrun, over Gloo"
        assert "rank(s)" in seen["cores"]["what"] or "2 ranks" in seen["cores"]["what"]
        assert seen.level("training") == "warning"  # ranks would multiply
        silent = setup.run("doctor", "--need", "launch", **ranks[1])
        assert (silent.returncode, silent.stdout, silent.stderr) == (0, "", "")

    @pytest.mark.parametrize(
        ("variables", "by"),
        [(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), "Open MPI"), (("RANK", "WORLD_SIZE"), "torchrun")],
    )
    def test_a_launcher_that_horovod_does_not_notice(self, setup: Setup, variables: tuple[str, str], by: str) -> None:
        (setup.working().packages / "horovod" / "torch" / "__init__.py").write_text(GLOO)
        seen = setup.doctor(**dict(zip(variables, "02", strict=True)))
        assert seen.errors == ["this process"] and by in seen["this process"]["what"]

    def test_more_ranks_than_cores(self, setup: Setup) -> None:
        setup.working()
        seen = setup.doctor("-np", "4096", OMP_NUM_THREADS="1")
        assert seen.level("cores") == "warning" and "OMP_NUM" not in seen["cores"]["remedy"]
        assert "OMPI_MCA_mpi_yield_when_idle=1" in seen["cores"]["remedy"]

    def test_a_horovodrun_of_another_python(self, setup: Setup) -> None:
        setup.working().program("horovodrun", "")
        assert "another Python" in setup.doctor()["horovodrun"]["what"]


class TestHosts:
    def test_hosts_by_ssh(self, setup: Setup) -> None:
        same = json.dumps(dict.fromkeys(("horovod", "torch", "keras", "hvd_averaging")))
        other = same.replace('"torch": null', '"torch": "2.1.0"')
        setup.working().program(
            "ssh",
            'for word; do case "$word" in\n'
            f"same) echo '{same}'; exit 0;;\nother) echo '{other}'; exit 0;;\n"
            "gone) echo 'Permission denied (publickey).' >&2; exit 255;;\nbare) exit 127;;\nesac; done",
        )
        (setup.packages / "hvd_averaging-0.dist-info").mkdir()
        seen = setup.doctor("-H", "localhost:1,same:1,other:1,gone:1,bare:1", "-np", "6")
        assert seen.level("host same") == "ok"
        assert seen.level("host other") == "warning" and "torch 2.1.0 (here None)" in seen["host other"]["what"]
        gone = "ssh does not get there: Permission denied (publickey)."
        assert seen.level("host gone") == "error" and seen["host gone"]["what"] == gone
        assert seen.level("host bare") == "error" and "same path" in seen["host bare"]["remedy"]
        assert "6 ranks, and 5 places" in seen["hosts"]["what"]

    @pytest.mark.parametrize("text", ["a", "a:0", "a:2,,b:1", "-oProxyCommand=x:1"])
    def test_nonsense_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="such as worker-0:2"):
            hosts.parse_hosts(text)

    def test_horovodrun_fills_hosts_in_order(self) -> None:
        places = hosts.parse_hosts("elsewhere:2,localhost:2")
        assert [hosts.ranks_here(places, ranks) for ranks in (1, 3, 9, None)] == [0, 1, 2, 2]
        assert hosts.ranks_here((), 3) == 3


class TestVariables:
    def test_what_is_set_is_told(self, setup: Setup) -> None:
        setup.working()
        seen = setup.doctor(
            HOROVOD_CYCLE_TIME="5",
            HOROVOD_AUTOTUNE="0",
            HOROVOD_GLOO_IFACE="no-such0",
            HOROVOD_CONTROLLER="gloo",
            TF_NUM_INTEROP_THREADS="1",
        )
        assert seen.level("HOROVOD_CYCLE_TIME") == "note" and seen.level("TF_NUM_INTEROP_THREADS") == "warning"
        assert seen.errors == ["HOROVOD_GLOO_IFACE"] and "lo" in seen["HOROVOD_GLOO_IFACE"]["remedy"]
        assert "HOROVOD_AUTOTUNE" not in str(seen.findings) and "HOROVOD_CONTROLLER" not in str(seen.findings)

    def test_a_backend_that_horovod_lacks(self, setup: Setup) -> None:
        (setup.working().packages / "horovod" / "torch" / "__init__.py").write_text(GLOO)
        assert setup.doctor(HOROVOD_CONTROLLER="MPI").errors == ["HOROVOD_CONTROLLER"]

    @pytest.mark.parametrize(
        ("value", "level", "says"),
        [
            ("1", "note", "may be added"),
            ("2 sets", "note", "may be added"),
            ("0", None, ""),
            ("true", "warning", "takes this for 0"),
            ("", "warning", "takes this for 0"),
        ],
    )
    def test_a_switch_is_a_number(self, setup: Setup, value: str, level: str | None, says: str) -> None:
        name = "HOROVOD_DYNAMIC_PROCESS_SETS"
        found = [each for each in setup.working().doctor(**{name: value}).findings if each["about"] == name]
        assert [each["level"] for each in found] == ([] if level is None else [level])
        assert all(says in each["what"] for each in found)


class TestCommand:
    def test_without_the_extra(self, bare: Setup) -> None:
        done = bare.run("doctor")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "hvd-averaging needs click; run: pip install 'hvd-averaging[cli]'\n"

    @pytest.mark.parametrize("arguments", [["-H", "a"], ["--need", "luck"], ["-np", "0"], ["--unknown"]])
    def test_a_wrong_command_line(self, setup: Setup, arguments: list[str]) -> None:
        done = setup.run("doctor", *arguments)
        assert done.returncode == 2 and "Error: " in done.stderr and "Traceback" not in done.stderr

    def test_the_builder(self, setup: Setup) -> None:
        told = setup.run("build-horovod", "--help")
        assert told.returncode == 0 and told.stdout.startswith("usage: hvd-averaging build-horovod [-h]")
        assert "--gpu {nccl}" in told.stdout
        assert setup.run("build-horovod", "--jobs", "0").returncode == 2
        failed = setup.run("build-horovod", "--no-install")
        assert failed.returncode == 1 and "neither PyTorch nor TensorFlow was found" in failed.stderr

    def test_the_oldest_versions_are_those_of_setup_py(self) -> None:
        wanted = {
            found[1]: (int(found[2]), int(found[3]))
            for found in re.finditer(r'"(torch|tensorflow)>=(\d+)\.(\d+)"', (ROOT / "setup.py").read_text())
        }
        assert wanted == frameworks.OLDEST


def test_two_ranks_train(tmp_path: Path) -> None:
    """The real thing: PyTorch over Gloo. TensorFlow is kept away, and mpirun, to save time."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TENSORFLOW)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "OMPI_"))}
    environment |= {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = without_mpirun(tmp_path / "bin", "sh", "env")
    command = [sys.executable, "-m", "hvd_averaging.cli", "doctor", "--json", "--smoke"]
    seen = diagnosis(subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120))
    assert seen.status == 0 and seen["Horovod"]["what"] == metadata.version("horovod")
    assert seen.level("training, Gloo") == "ok"
    steps = re.match(r"PyTorch: 2 ranks, (\d+) steps, (\d+) rounds, loss", seen["training, Gloo"]["what"])
    assert steps and int(steps[1]) == 8 * (int(steps[2]) - 1) > 0


def without_mpirun(folder: Path, *names: str) -> str:
    """A PATH with nothing but the programs `names`, which a launch needs."""
    folder.mkdir()
    for name in names:
        found = shutil.which(name)
        assert found, name
        (folder / name).symlink_to(found)
    return str(folder)


class TestTrainingThatFails:
    def fails(self, setup: Setup, horovodrun: str, *arguments: str) -> str:
        (setup.working().packages / "horovod" / "torch" / "__init__.py").write_text(GLOO)
        program = setup.python.with_name("horovodrun")
        program.write_text(f"#!/bin/sh\n{horovodrun}")
        try:
            seen = setup.doctor("--smoke", *arguments, PATH=os.defpath, HOME=str(setup.programs))
        finally:
            program.write_text("")
        assert seen.errors == ["training, Gloo"] and "smoke_training torch gloo" in seen["training, Gloo"]["remedy"]
        return seen["training, Gloo"]["what"]

    def test_a_rank_says_why(self, setup: Setup) -> None:
        said = self.fails(
            setup,
            "printf '[1]<stderr>:%s\\n' 'OSError: no link' Terminated >&2; echo 'RuntimeError: it failed' >&2; exit 1",
        )
        assert said == "PyTorch: OSError: no link"

    def test_a_launch_without_an_end(self, setup: Setup) -> None:
        # The shell ends at once when it is asked to, and its child, like mpirun, a moment later.
        child = """sh -c 'trap "sleep 0.3; echo ended >$HOME/log; exit" TERM; while :; do sleep 0.05; done' & wait"""
        assert self.fails(setup, child, "--limit", "1") == "PyTorch: did not end within 1 seconds"
        assert (setup.programs / "log").read_text() == "ended\n"


def test_find_launch_prefers_horovodruns_own_words() -> None:
    """Under Slurm or a container, variables of several launchers may be set."""
    variables = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4", "RANK": "0", "WORLD_SIZE": "1"}
    assert launching.find_launch(variables) == launching.Launch("horovodrun, over Gloo", 1, 4, None)
