"""The command line: what is asked for, the order of the steps, and what the user reads about them."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from hvd_averaging.build_horovod import cache as caches
from hvd_averaging.build_horovod import compile as compilation
from hvd_averaging.build_horovod import install, source, toolchain, verify
from hvd_averaging.build_horovod.edits import apply_edits
from hvd_averaging.build_horovod.environment import Environment, Wanted, find_environment
from hvd_averaging.build_horovod.errors import BuildError, from_os_error
from hvd_averaging.build_horovod.progress import Progress, clock
from hvd_averaging.build_horovod.target import Target


def main(arguments: Sequence[str], program: str) -> int:
    """Build, install and verify as the command line of `program` asks; returns the exit status, 0 or 1."""
    options = _parser(program).parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        _run(options)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: {from_os_error(error)}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nerror: interrupted; nothing half-finished is left\n  what to do: run it again", file=sys.stderr)
    else:
        return 0
    return 1


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=f"Build Horovod {source.HOROVOD_VERSION} against the PyTorch and TensorFlow of this Python, "
        "install it and prove that it works. The wheel is kept: the next time takes seconds.",
    )
    parser.add_argument("--without-torch", action="store_true", help="leave PyTorch out even if it is installed")
    parser.add_argument("--without-tensorflow", action="store_true", help="leave TensorFlow out, likewise")
    mpi = parser.add_mutually_exclusive_group()
    mpi.add_argument("--with-mpi", action="store_true", help="fail if MPI is not there (default: use it if it is)")
    mpi.add_argument("--without-mpi", action="store_true", help="leave MPI out: Gloo only")
    parser.add_argument("--gpu", choices=["nccl"], help="build for GPUs with NCCL (default: for CPUs)")
    parser.add_argument("--jobs", type=_positive, metavar="N", help="compilers to run at a time (default: what fits)")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="where wheels are kept (default: user's cache)")
    parser.add_argument("--no-install", action="store_true", help="only build, and print where the wheel is")
    parser.add_argument("--force", action="store_true", help="build anew even if a wheel is kept")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run(options: argparse.Namespace) -> None:
    folder = (options.cache_dir or caches.default_folder()).expanduser().resolve()
    if not options.no_install:
        install.require_installable()
    environment = find_environment(_wanted(options), folder / "nccl")
    _say(f"Horovod {source.HOROVOD_VERSION} for {_in_words(environment.target)}")
    for remark in environment.remarks:
        _say(remark)
    wheel = _wheel(caches.Cache(folder, environment.target), environment, options)
    if options.no_install:
        _say(str(wheel))
    else:
        _install(wheel, environment.target)


def _wanted(options: argparse.Namespace) -> Wanted:
    mpi = True if options.with_mpi else False if options.without_mpi else None
    return Wanted(not options.without_torch, not options.without_tensorflow, mpi, options.gpu)


def _wheel(cache: caches.Cache, environment: Environment, options: argparse.Namespace) -> Path:
    """The kept wheel, or a new one."""
    with cache.locked(lambda: _say("the same Horovod is being built by another process; waiting for it")):
        kept = None if options.force else cache.wheel()
        return kept or _build(cache, environment, options.jobs or compilation.default_jobs())


def _build(cache: caches.Cache, environment: Environment, jobs: int) -> Path:
    source.require_build_packages()
    cmake = toolchain.find_cmake()
    progress = Progress(sys.stdout)
    with cache.workshop() as workshop:
        unpacked = source.unpack(source.sdist(cache.sdists), workshop)
        apply_edits(unpacked, environment.target)
        _say(f"compiling, {jobs} at a time; a few minutes. Log: {cache.log}")
        variables = environment.variables | cmake.variables
        try:
            wheel = compilation.compile_wheel(unpacked, workshop, variables, jobs, cache.log, progress.read)
        finally:
            progress.finish()
        _say(f"compiled in {clock(progress.seconds)}")
        return cache.keep(wheel, {"seconds": round(progress.seconds), "jobs": jobs, "cmake": cmake.name})


def _install(wheel: Path, target: Target) -> None:
    """Install `wheel` unless it is there already, and prove that it works."""
    fresh = not install.is_installed(wheel)
    if fresh:
        _say(f"installing {wheel.name}")
        install.install(wheel)
        verify.check_build(target)
    verify.check_averages(target)
    state = "installed" if fresh else "was already installed"
    _say(f"Horovod {state} and works: {', '.join(sorted(verify.expected(target)))}")


def _in_words(target: Target) -> str:
    named = {"torch": target.torch, "TensorFlow": target.tensorflow, "MPI": target.mpi, "GPU": target.gpu}
    parts = [f"{name} {found}" for name, found in named.items() if found]
    return ", ".join([f"Python {sys.version_info[0]}.{sys.version_info[1]}", *parts, target.compiler])


def _say(text: str) -> None:
    print(text, flush=True)
