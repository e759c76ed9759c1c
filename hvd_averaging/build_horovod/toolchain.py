"""The programs a build needs: a C++ compiler, CMake, Python's headers, and MPI where it is there."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from pathlib import Path

from hvd_averaging.build_horovod.commands import output_of, which
from hvd_averaging.build_horovod.errors import BuildError
from hvd_averaging.build_horovod.target import Part

MPI_REMEDY = "apt-get install libopenmpi-dev openmpi-bin"

_OLDEST_CMAKE = (3, 13)
# The processor features that Horovod has fast paths for, as flag and as the macro the compiler defines with it.
_CPU_FEATURES = {"-mf16c": "__F16C__", "-mavx": "__AVX__", "-mfma": "__FMA__"}
_FLAG_VARIABLES = ("CFLAGS", "CPPFLAGS", "CXXFLAGS", "LDFLAGS")


def find_compiler() -> Part:
    """The C++ compiler: the one that `CXX` names, else the system's."""
    chosen = os.environ.get("CXX")
    path = which(chosen) if chosen else which("c++", "g++", "clang++")
    version = output_of([path, "--version"]) if path else None
    if path is None or not version:
        raise BuildError(
            f"the C++ compiler that CXX names does not run: {chosen}" if chosen else "no C++ compiler was found",
            "install one (apt-get install g++), or name one in the variable CXX",
        )
    return Part(version.splitlines()[0], {"CXX": path, "HOROVOD_BUILD_ARCH_FLAGS": cpu_flags(path)})


def cpu_flags(compiler: str) -> str:
    """The flags for this processor's features; the user's own `HOROVOD_BUILD_ARCH_FLAGS`, where set, wins."""
    own = os.environ.get("HOROVOD_BUILD_ARCH_FLAGS")
    if own is not None:
        return own
    macros = output_of([compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]) or ""
    return " ".join(flag for flag, macro in _CPU_FEATURES.items() if macro in macros)


def user_flags() -> str:
    """The compiler and linker flags that the user's environment sets, which the build honours."""
    return " ".join(f"{name}={os.environ[name]}" for name in _FLAG_VARIABLES if os.environ.get(name))


def require_compiler_features(compiler: str, cxx_standard: int) -> None:
    """Raise `BuildError` unless `compiler` knows the C++ standard and finds Python's headers."""
    if not _compiles(compiler, "int main() { return 0; }", f"-std=c++{cxx_standard}"):
        raise BuildError(
            f"{compiler} does not know C++{cxx_standard}, which the installed framework's headers need",
            "install a newer compiler (g++ 11 or later) and name it in the variable CXX",
        )
    headers = sysconfig.get_path("include")
    if not (Path(headers) / "Python.h").is_file():
        version = "{}.{}".format(*sys.version_info[:2])
        raise BuildError(
            f"the headers of Python {version} were not found",
            f"install them: apt-get install python{version}-dev (or python3-dev)",
        )


def find_cmake() -> Part:
    """CMake, in a version that Horovod's build understands."""
    path = which("cmake")
    version = re.search(r"version (\d+)\.(\d+)", output_of([path, "--version"]) or "") if path else None
    if version is None or (int(version[1]), int(version[2])) < _OLDEST_CMAKE:
        raise BuildError(
            "CMake {}.{} or later was not found".format(*_OLDEST_CMAKE),
            f"run: {sys.executable} -m pip install cmake (or: apt-get install cmake)",
        )
    if which("make", "gmake") is None:
        raise BuildError("make was not found", "install it: apt-get install make")
    return Part(version[0], {"HOROVOD_CMAKE": str(path)})


def find_mpi(wanted: bool | None = None) -> Part:
    """MPI, where both its launcher and its headers are there. `wanted` is None for "if it is there".

    Raises:
        BuildError: it is wanted and not there.
    """
    launcher, compiler = which("mpirun"), which("mpicxx", "mpic++")
    version = output_of([launcher, "--version"]) if launcher and wanted is not False else None
    if version and compiler and _compiles(compiler, "#include <mpi.h>"):
        return Part(version.splitlines()[0].removeprefix("mpirun "), {"HOROVOD_WITH_MPI": "1"})
    if wanted:
        raise BuildError("MPI's launcher or headers were not found", f"install them: {MPI_REMEDY}")
    return Part(None, {"HOROVOD_WITHOUT_MPI": "1"})


def _compiles(compiler: str, program: str, *flags: str) -> bool:
    return output_of([compiler, *flags, "-fsyntax-only", "-x", "c++", "-"], stdin=program) is not None
