"""The builder of Horovod: its edits on the real source, its cache, and each way it can fail, provoked for real.

No test compiles Horovod to the end; `scripts/setup` does that before any test runs.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvd_averaging.build_horovod import cache as caches
from hvd_averaging.build_horovod import cli, commands, compile, edits, frameworks, install, source, toolchain, verify
from hvd_averaging.build_horovod.environment import Wanted, find_environment
from hvd_averaging.build_horovod.errors import BuildError, from_os_error
from hvd_averaging.build_horovod.host import unsupported_host
from hvd_averaging.build_horovod.progress import Progress, clock, share_of_time
from hvd_averaging.build_horovod.target import Target, release

ROOT = Path(__file__).resolve().parents[1]
CPU = Target(
    python="cpython-311-x86_64-linux-gnu",
    platform="linux-x86_64 glibc 2.36",
    compiler="g++ 12.2.0",
    flags="-mavx",
    torch="2.13.0+cpu",
    tensorflow="2.21.0 (tensorflow-cpu)",
    mpi="(Open MPI) 4.1.4",
)
GPU = dataclasses.replace(CPU, torch="2.14.1+cu130", tensorflow=None, gpu="NCCL 2.28.3, CUDA 13.0")
OLD = dataclasses.replace(CPU, torch="2.2.0", tensorflow="2.15.1 (tensorflow)")


def run_builder(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The builder's command line, in a process of its own."""
    command = [sys.executable, "-m", "hvd_averaging.build_horovod", *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


def assert_failed_cleanly(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """One message with a remedy, the exit status 1, no traceback."""
    assert done.returncode == 1, done.stderr
    assert done.stderr.lstrip().startswith("error: ") and done.stderr.count("error: ") == 1
    assert "what to do: " in done.stderr and "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


@pytest.fixture(scope="session")
def sdist() -> Path:
    """Horovod's real source archive, from the user's cache or through pip."""
    return source.sdist(caches.default_folder() / "sdists")


@pytest.fixture(scope="session")
def pristine(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source, not to be changed."""
    return source.unpack(sdist, tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def unpacked(pristine: Path, tmp_path: Path) -> Path:
    """A copy, of all that the edits may touch."""
    ignored = shutil.ignore_patterns("third_party", "docker", "mxnet", "spark", "ray")
    copy = Path(shutil.copytree(pristine, tmp_path / "horovod", ignore=ignored))
    for name in {name for edit in edits.EDITS for name in edit.files}:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(pristine / name, copy / name)
    return copy


@pytest.fixture
def seeded_cache(sdist: Path, tmp_path: Path) -> Path:
    """An empty cache but for the source archive, so that a build does not wait for pip."""
    folder = tmp_path / "cache"
    (folder / "sdists").mkdir(parents=True)
    shutil.copy(sdist, folder / "sdists")
    return folder


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 kB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a disk that can be filled needs the right to mount one")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def programs(folder: Path, *names: str) -> Path:
    """A folder to serve as PATH, with nothing but the programs `names`."""
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(shutil.which(name) or pytest.skip(f"no {name} here"))
    return folder


def script(path: Path, text: str) -> Path:
    """An executable shell script."""
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


class TestCommandLine:
    def test_help_names_every_option(self) -> None:
        done = run_builder("--help")
        assert done.returncode == 0
        for option in ("torch", "tensorflow", "mpi"):
            assert f"--without-{option}" in done.stdout
        for option in ("--with-mpi", "--gpu {nccl}", "--jobs N", "--cache-dir DIR", "--no-install", "--force"):
            assert option in done.stdout

    @pytest.mark.parametrize("arguments", [["--jobs", "0"], ["--gpu", "mpi"], ["--with-mpi", "--without-mpi"]])
    def test_nonsense_is_refused(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as exit:
            cli.main(arguments, "builder")
        assert exit.value.code == 2 and "usage: " in capsys.readouterr().err


class TestHost:
    @pytest.mark.parametrize("minor", [10, 11, 12, 13])
    def test_supported(self, minor: int) -> None:
        assert unsupported_host((3, minor), "cpython", "linux") == ""

    @pytest.mark.parametrize(
        ("python", "implementation", "system"),
        [
            ((3, 9), "cpython", "linux"),
            ((3, 14), "cpython", "linux"),
            ((3, 11), "pypy", "linux"),
            ((3, 11), "cpython", "win32"),
        ],
    )
    def test_unsupported(self, python: tuple[int, int], implementation: str, system: str) -> None:
        assert "what to do: use " in unsupported_host(python, implementation, system)


class TestTarget:
    def test_release(self) -> None:
        assert release("2.13.0+cpu") == (2, 13) and release("2.21.0 (tensorflow-cpu)") == (2, 21)
        with pytest.raises(ValueError, match="does not start with a version"):
            release("unknown")

    @pytest.mark.parametrize(
        ("torch", "tensorflow", "standard"),
        [
            ("2.13.0", None, 20),
            ("2.13.0", "2.21.0", 20),
            ("2.12.1", "2.21.0", 17),
            ("2.1.0", None, 17),
            ("2.0.1", "2.9.0", 14),
            (None, "2.10.0", 17),
        ],
    )
    def test_cxx_standard_serves_all_frameworks(self, torch: str, tensorflow: str, standard: int) -> None:
        assert dataclasses.replace(CPU, torch=torch, tensorflow=tensorflow).cxx_standard == standard


class TestEdits:
    @pytest.mark.parametrize("target", [CPU, GPU, OLD], ids=["cpu", "gpu", "old"])
    def test_every_edit_finds_its_place(self, unpacked: Path, target: Target) -> None:
        edits.apply_edits(unpacked, target)
        cmake = "\n".join(path.read_text() for path in unpacked.rglob("CMakeLists.txt"))
        assert set(re.findall(r"set\(CMAKE_CXX_STANDARD (\d+)\)", cmake)) == {str(target.cxx_standard)}
        assert ("xla_mpi_ops.cc" in cmake) == (target is not CPU)
        assert ("check_language(CUDA)\nif(" in cmake) == (target is GPU)
        assert f"set(CMAKE_CUDA_STANDARD {17 if target is GPU else 11})" in cmake
        assert ("torch.version.cuda" in (unpacked / "cmake/Modules/FindPytorch.cmake").read_text()) == (target is GPU)
        setup = (unpacked / "setup.py").read_text()
        assert "setup_requires=" not in setup and "else 'Release'" in setup

    def test_nothing_that_python_3_12_dropped_is_left(self, unpacked: Path) -> None:
        edits.apply_edits(unpacked, CPU)
        gone = re.compile(r"\b(from|import) (distutils|imp|asynchat|asyncore|pipes|pkg_resources)\b")
        texts = [path for path in unpacked.rglob("*") if path.suffix in (".py", ".txt", ".cmake")]
        assert [path for path in texts if gone.search(path.read_text(errors="replace"))] == []

    def test_edited_python_still_compiles(self, unpacked: Path) -> None:
        edits.apply_edits(unpacked, CPU)
        files = [str(unpacked / name) for name in ("setup.py", "horovod/runner/js_run.py")]
        subprocess.run([sys.executable, "-W", "error", "-m", "py_compile", *files], check=True)

    @pytest.mark.parametrize("edit", edits.EDITS, ids=lambda edit: f"{edit.files[0]}: {edit.why[:40]}")
    def test_a_changed_source_is_refused(self, unpacked: Path, edit: edits.Edit) -> None:
        target = next(target for target in (CPU, GPU) if edit.when(target))
        path = unpacked / edit.files[-1]
        path.write_text(re.sub(edit.find, "something else", path.read_text(), flags=re.MULTILINE))
        with pytest.raises(BuildError, match="source is not what we expect"):
            edits.apply_edits(unpacked, target)

    def test_a_missing_file_is_refused(self, unpacked: Path) -> None:
        (unpacked / "setup.py").unlink()
        with pytest.raises(BuildError, match=r"source is not what we expect: nothing in setup\.py"):
            edits.apply_edits(unpacked, CPU)


class TestSource:
    def test_kept_archive_is_used_without_pip(self, seeded_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        offline(monkeypatch, seeded_cache / "empty")
        assert source.sdist(seeded_cache / "sdists").is_file()

    def test_offline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        offline(monkeypatch, tmp_path)
        with pytest.raises(BuildError, match="pip could not fetch Horovod") as error:
            source.sdist(tmp_path / "sdists")
        assert source.SDIST_NAME in error.value.remedy
        assert list((tmp_path / "sdists").iterdir()) == []

    def test_a_spoilt_archive_in_the_cache_is_fetched_again(
        self, sdist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        offline(monkeypatch, sdist.parent)
        (tmp_path / source.SDIST_NAME).write_bytes(sdist.read_bytes()[:1000])
        assert source.sdist(tmp_path).read_bytes() == sdist.read_bytes()

    def test_hash_mismatch(self, sdist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        index = tmp_path / "index"
        index.mkdir()
        (index / source.SDIST_NAME).write_bytes(sdist.read_bytes() + b"\0")
        offline(monkeypatch, index)
        with pytest.raises(BuildError, match="is not the release we know: its SHA-256 is"):
            source.sdist(tmp_path / "sdists")
        assert list((tmp_path / "sdists").iterdir()) == []


def offline(monkeypatch: pytest.MonkeyPatch, archives: Path) -> None:
    """Let pip see nothing but the files in `archives`."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(archives))


class TestEnvironment:
    def test_finds_what_is_here(self, tmp_path: Path) -> None:
        environment = find_environment(Wanted(), tmp_path)
        torch, tensorflow = environment.target.torch, environment.target.tensorflow
        assert torch and tensorflow and release(torch) >= (2, 0) and release(tensorflow) >= (2, 0)
        assert environment.target.python.startswith("cpython-3")
        assert environment.variables["HOROVOD_WITH_PYTORCH"] == "1"
        assert Path(environment.variables["CXX"]).is_file()

    def test_a_framework_left_out(self, tmp_path: Path) -> None:
        environment = find_environment(Wanted(tensorflow=False), tmp_path)
        assert environment.target.tensorflow is None
        assert environment.variables["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
        assert "HOROVOD_WITH_TENSORFLOW" not in environment.variables

    def test_no_framework_is_imported(self) -> None:
        code = (
            "import sys, pathlib; from hvd_averaging.build_horovod.environment import Wanted, find_environment;"
            "find_environment(Wanted(), pathlib.Path('/nonexistent'));"
            "sys.exit(bool({'torch', 'tensorflow', 'keras', 'horovod', 'numpy'} & set(sys.modules)))"
        )
        assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0

    def test_no_framework(self) -> None:
        done = run_builder("--without-torch", "--without-tensorflow")
        assert_failed_cleanly(done, "neither PyTorch nor TensorFlow", "pip install torch")

    def test_no_compiler(self, tmp_path: Path) -> None:
        done = run_builder(PATH=str(programs(tmp_path / "bin")))
        assert_failed_cleanly(done, "no C++ compiler", "apt-get install g++")

    def test_compiler_that_does_not_run(self) -> None:
        assert_failed_cleanly(run_builder(CXX="c++-of-tomorrow"), "c++-of-tomorrow", "CXX")

    def test_compiler_too_old(self, tmp_path: Path) -> None:
        old = script(tmp_path / "old", 'case "$*" in *-std=c++2*) exit 1;; esac; exec c++ "$@"')
        assert_failed_cleanly(run_builder(CXX=str(old)), "does not know C++20", "newer compiler")

    def test_without_mpi_the_build_goes_on_with_gloo(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(programs(tmp_path / "bin", "c++")))
        environment = find_environment(Wanted(), tmp_path)
        assert environment.target.mpi is None and environment.variables["HOROVOD_WITHOUT_MPI"] == "1"
        assert [remark for remark in environment.remarks if "Gloo only" in remark and "libopenmpi-dev" in remark]
        assert find_environment(Wanted(mpi=False), tmp_path).remarks == environment.remarks[1:]

    def test_mpi_that_is_demanded(self, tmp_path: Path) -> None:
        done = run_builder("--with-mpi", PATH=str(programs(tmp_path / "bin", "c++")))
        assert_failed_cleanly(done, "MPI", "libopenmpi-dev")

    @pytest.mark.parametrize("version", [None, "3.5.1"])
    def test_no_cmake(self, version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = programs(tmp_path / "bin")
        if version:
            script(folder / "cmake", f"echo cmake version {version}")
        # The interpreter's own scripts, among them perhaps CMake, would be found without PATH.
        monkeypatch.setattr(commands, "search_path", lambda: str(folder))
        with pytest.raises(BuildError, match=r"CMake 3\.13 or later") as error:
            toolchain.find_cmake()
        assert "pip install cmake" in error.value.remedy

    @pytest.mark.skipif(frameworks.torch_cuda_version() is not None, reason="this PyTorch is made for CUDA")
    def test_gpu_without_a_pytorch_for_it(self) -> None:
        assert_failed_cleanly(run_builder("--gpu", "nccl"), "PyTorch made for CUDA", "leave out --gpu")

    def test_settings_that_the_key_does_not_know_are_dropped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "MPI")
        assert not [name for name in commands.base_environment() if name.startswith("HOROVOD_")]

    def test_flags_are_known_to_the_key(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = caches.key_of(find_environment(Wanted(), tmp_path).target)
        monkeypatch.setenv("CXXFLAGS", "-O1")
        assert caches.key_of(find_environment(Wanted(), tmp_path).target) != before


class TestCache:
    def test_key_depends_on_everything_that_matters(self) -> None:
        changed = [dataclasses.replace(CPU, **{field.name: "2.0"}) for field in dataclasses.fields(CPU)]
        assert len({caches.key_of(target) for target in [CPU, *changed]}) == len(changed) + 1

    def test_key_depends_on_the_edits_that_apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cpu, gpu = caches.key_of(CPU), caches.key_of(GPU)
        for_gpu = dataclasses.replace(edits.EDITS[0], find="other", when=lambda target: target.gpu is not None)
        monkeypatch.setattr(edits, "EDITS", (*edits.EDITS, for_gpu))
        assert caches.key_of(CPU) == cpu and caches.key_of(GPU) != gpu

    def test_key_depends_on_the_source(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = caches.key_of(CPU)
        monkeypatch.setattr(caches, "SDIST_SHA256", "0")
        assert caches.key_of(CPU) != before

    def test_default_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert caches.default_folder() == tmp_path / "hvd_averaging"
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert caches.default_folder() == Path.home() / ".cache" / "hvd_averaging"

    def test_a_wheel_is_kept_with_its_description(self, tmp_path: Path) -> None:
        cache = caches.Cache(tmp_path, CPU)
        assert cache.wheel() is None
        for content in ("first", "second"):
            with cache.workshop() as workshop:
                (workshop / "horovod.whl").write_text(content)
                kept = cache.keep(workshop / "horovod.whl", {"seconds": 3})
            assert kept == cache.wheel() and kept.read_text() == content
        facts = json.loads(kept.with_name("build.json").read_text())
        assert facts["torch"] == CPU.torch and facts["seconds"] == 3 and facts["sdist_sha256"] == source.SDIST_SHA256

    def test_what_a_killed_build_left_is_swept(self, tmp_path: Path) -> None:
        cache = caches.Cache(tmp_path, CPU)
        left = tmp_path / "build" / cache.key / "horovod.whl"
        left.parent.mkdir(parents=True)
        left.touch()
        with cache.workshop() as workshop:
            assert list(workshop.iterdir()) == []
        assert not workshop.exists() and cache.wheel() is None

    def test_two_builds_of_the_same_wait_for_each_other(self, tmp_path: Path) -> None:
        cache = caches.Cache(tmp_path, CPU)
        lock = tmp_path / "locks" / f"{cache.key}.lock"
        lock.parent.mkdir()
        hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(); input()"
        command = [sys.executable, "-c", hold, str(lock)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout
            other.stdout.readline()
            waited: list[str] = []
            with cache.locked(lambda: waited.extend(other.communicate("\n"))):
                assert waited and other.returncode == 0


class TestFailuresWhileBuilding:
    def test_disk_too_small(self, tiny_disk: Path) -> None:
        done = run_builder("--no-install", "--without-tensorflow", "--cache-dir", str(tiny_disk))
        assert_failed_cleanly(done, "the disk is full", "MB free", "--cache-dir")
        assert list(tiny_disk.rglob("*.whl")) == [] and list((tiny_disk / "build").iterdir()) == []

    def test_disk_that_fills_up(self, tiny_disk: Path) -> None:
        shout = [sys.executable, "-c", "while True: print('x' * 1000)"]
        with pytest.raises(OSError, match="No space left") as error:
            compile.run_logged(shout, tiny_disk, dict(os.environ), tiny_disk / "log", lambda line: None)
        assert from_os_error(error.value).problem == "the disk is full"

    def test_compiler_that_runs_out_of_space_or_memory(self, tmp_path: Path) -> None:
        for said, problem in (("No space left on device", "disk is full"), ("Killed signal terminated", "memory")):
            (tmp_path / "setup.py").write_text(f"print('c++: fatal error: {said} program cc1plus'); exit(1)")
            with pytest.raises(BuildError, match=problem):
                compile.compile_wheel(tmp_path, tmp_path, {}, 1, tmp_path / "log", lambda line: None)

    def test_compile_error_is_shown_with_the_log(self, seeded_cache: Path, tmp_path: Path) -> None:
        message = "main.cc:1: error: not today"
        broken = script(
            tmp_path / "broken", f'case "$*" in *" -o "*) echo "{message}" >&2; exit 1;; esac; exec c++ "$@"'
        )
        arguments = ["--no-install", "--without-tensorflow", "--cache-dir", str(seeded_cache)]
        done = run_builder(*arguments, CXX=str(broken))
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert "Horovod did not compile" in done.stderr and message in done.stderr
        log = Path(re.findall(r"log: (.+)", done.stderr)[-1])
        assert message in log.read_text()
        assert_no_traces(seeded_cache)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_interrupted(self, number: int, seeded_cache: Path) -> None:
        arguments = ["--no-install", "--without-tensorflow", "--cache-dir", str(seeded_cache)]
        command = [sys.executable, "-m", "hvd_averaging.build_horovod", *arguments]
        # Jobs that a shell runs in the background ignore Ctrl-C, and so do their children, unless told otherwise.
        heed = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=heed) as builder:
            try:
                wait_until(lambda: "CXX compiler" in "".join(log.read_text() for log in seeded_cache.glob("logs/*")))
                builder.send_signal(number)
                _, stderr = builder.communicate(timeout=20)
            finally:
                builder.terminate()
        assert_failed_cleanly(subprocess.CompletedProcess(command, builder.returncode, "", stderr), "interrupted")
        assert_no_traces(seeded_cache)
        assert processes_using(seeded_cache) == []


def assert_no_traces(cache: Path) -> None:
    """Neither a wheel, nor the folder it was being built in."""
    assert list(cache.rglob("*.whl")) == [] and list((cache / "build").iterdir()) == []


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for `condition` to come true, half a minute at most."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def processes_using(folder: Path) -> list[str]:
    """Command lines of running processes that work in or on `folder`."""
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if str(folder) in line]


class TestProgress:
    def test_lines_where_there_is_no_terminal(self) -> None:
        stream = io.StringIO()
        progress = Progress(stream)
        for percent in range(101):
            progress.read(f"[{percent:3d}%] Building CXX object\n")
            progress.read("a warning that mentions [ 99%]\n")
        progress.finish()
        lines = stream.getvalue().splitlines()
        assert [line[:6] for line in lines] == [f"[{percent:3d}%]" for percent in range(10, 101, 10)]
        assert "left" not in lines[0] and "about 0:00 left" in lines[-1]

    def test_share_of_time_grows_from_nothing_to_all(self) -> None:
        shares = [share_of_time(percent) for percent in range(101)]
        assert shares[0] == 0 and shares[-1] == 1 and shares == sorted(shares)

    def test_clock(self) -> None:
        assert clock(59.6) == "1:00" and clock(187) == "3:07"


class TestInstalled:
    def test_another_wheel_is_not_taken_for_the_installed_one(self, tmp_path: Path) -> None:
        wheel = tmp_path / "horovod.whl"
        wheel.write_bytes(b"other")
        assert not install.is_installed(wheel)

    def test_expected_words(self) -> None:
        assert verify.expected(CPU) == {"Gloo", "MPI", "PyTorch", "TensorFlow"}
        assert verify.expected(dataclasses.replace(GPU, mpi=None)) == {"Gloo", "NCCL", "PyTorch"}

    def test_a_failing_average_is_an_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['horovod.torch'] = None")
        with pytest.raises(
            BuildError, match=r"(?s)an allreduce over one rank with torch failed:.*horovod\.torch"
        ) as error:
            verify.check_averages(dataclasses.replace(CPU, tensorflow=None))
        assert "--force" in error.value.remedy

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a process a machine's name of its own")
    def test_a_machine_whose_name_has_no_address_is_told_what_to_do(self) -> None:
        program = (
            "import socket\n"
            "from hvd_averaging.build_horovod import errors, verify\n"
            "from hvd_averaging.build_horovod.target import Target\n"
            "socket.sethostname('has-no-address.invalid')\n"
            "target = Target(python='', platform='', compiler='', flags='', torch='2.13.0')\n"
            "try:\n    verify.check_averages(target)\nexcept errors.BuildError as error:\n    print(error)\n"
        )
        command = ["unshare", "--uts", sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if "Operation not permitted" in done.stderr:
            pytest.skip(done.stderr.strip())
        assert "own name has no address" in done.stdout and "/etc/hosts" in done.stdout, done.stdout + done.stderr
