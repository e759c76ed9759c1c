"""The edits that Horovod's last release needs to compile here: a table of rules, read top to bottom.

A rule names what it looks for, not where: no upstream line is copied. The source is pinned by its hash, so a rule that
finds nothing means that the source is not the one the rules were written for, and the build stops.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hvd_averaging.build_horovod.errors import BuildError
from hvd_averaging.build_horovod.target import Target


@dataclass(frozen=True)
class Edit:
    """Replace every match of the regular expression `find` (multi-line) in each of `files`, `when` the target asks.

    `{cxx_standard}` in `replace` stands for the target's C++ standard.
    """

    why: str
    files: tuple[str, ...]
    find: str
    replace: str
    when: Callable[[Target], bool] = lambda target: True


EDITS = (
    Edit(
        why="torch >= 2.1 and TensorFlow >= 2.10 need a newer C++; one standard for all serves both",
        files=("CMakeLists.txt", "horovod/torch/CMakeLists.txt", "horovod/tensorflow/CMakeLists.txt"),
        find=r"set\(CMAKE_CXX_STANDARD \d+\)",
        replace="set(CMAKE_CXX_STANDARD {cxx_standard})",
    ),
    Edit(
        why="it names int32_t and std::string; since GCC 13 the standard headers no longer bring them along",
        files=("horovod/common/group_table.h",),
        find=r"^#include <mutex>$",
        replace="#include <cstdint>\n#include <mutex>\n#include <string>",
    ),
    Edit(
        why="an assignment that nobody calls assigns to a constant, which GCC 14 does not overlook",
        files=("third_party/flatbuffers/include/flatbuffers/stl_emulation.h",),
        find=r"const size_type count_;",
        replace="size_type count_;",
    ),
    Edit(
        why="the XLA headers left TensorFlow's wheel in 2.16; this source matters only to XLA on a GPU",
        files=("horovod/tensorflow/CMakeLists.txt",),
        find=r"^.*/xla_mpi_ops\.cc.*\n",
        replace="",
        when=lambda target: target.has("tensorflow", (2, 16)),
    ),
    Edit(
        why="distutils left Python in 3.12",
        files=("horovod/torch/CMakeLists.txt",),
        find=r"from distutils\.sysconfig import get_python_inc; print\(get_python_inc\(\)\)",
        replace="import sysconfig; print(sysconfig.get_path('include'))",
    ),
    Edit(
        why="distutils left Python in 3.12",
        files=("horovod/runner/js_run.py",),
        find=r"from distutils\.spawn import find_executable",
        replace="from shutil import which as find_executable",
    ),
    Edit(
        why="debug information makes the build several times slower and the wheel larger, and nobody here reads it",
        files=("setup.py",),
        find=r"'RelWithDebInfo'",
        replace="'Release'",
    ),
    Edit(
        why="the wheel's run-time needs are installed with it: a second, hidden download while building is not wanted",
        files=("setup.py",),
        find=r"setup_requires=.*,$",
        replace="",
    ),
    Edit(
        why="a CPU build must not notice a CUDA toolkit that happens to be there, nor fail because it is unfit",
        files=("CMakeLists.txt",),
        find=r"^check_language\(CUDA\)\nif\(NOT CMAKE_CUDA_COMPILER\)",
        replace="if(FALSE)",
        when=lambda target: target.gpu is None,
    ),
    Edit(
        why="a CPU build against a torch made for CUDA must not link its CUDA half",
        files=("cmake/Modules/FindPytorch.cmake",),
        find=r"torch\.version\.cuda is not None",
        replace="False",
        when=lambda target: target.gpu is None,
    ),
    Edit(
        why="CUDA 13's headers need C++17, which nvcc must be told once only, here",
        files=("horovod/common/ops/cuda/CMakeLists.txt",),
        find=r"set\(CMAKE_CUDA_STANDARD \d+\)",
        replace="set(CMAKE_CUDA_STANDARD 17)",
        when=lambda target: target.gpu is not None,
    ),
)


def edits_for(target: Target) -> Iterator[tuple[Edit, str]]:
    """Each edit that `target` needs, with its replacement text for that target."""
    for edit in EDITS:
        if edit.when(target):
            yield edit, edit.replace.replace("{cxx_standard}", str(target.cxx_standard))


def fingerprint(target: Target) -> str:
    """A hash of what the edits do for `target`; a change to the rules for other targets leaves it as it is."""
    content = [(edit.files, edit.find, replacement) for edit, replacement in edits_for(target)]
    return hashlib.sha256(repr(content).encode()).hexdigest()


def apply_edits(source: Path, target: Target) -> None:
    """Edit the unpacked Horovod under `source` in place.

    Raises:
        BuildError: an edit finds nothing to change, or its file is missing.
    """
    for edit, replacement in edits_for(target):
        for name in edit.files:
            _substitute(source / name, edit, replacement)


def _substitute(path: Path, edit: Edit, replacement: str) -> None:
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    # A function, so that a backslash in the replacement stays one.
    after, count = re.subn(edit.find, lambda _: replacement, before, flags=re.MULTILINE)
    if count == 0:
        raise BuildError(
            f"Horovod's source is not what we expect: nothing in {path.name} to edit ({edit.why})",
            "report this as a fault of hvd_averaging, with the command you ran",
        )
    path.write_text(after, encoding="utf-8")
