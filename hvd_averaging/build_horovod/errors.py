"""How a build ends when it cannot go on: one sentence that says what is wrong, one that says what to do.

Everything a user can run into is raised as `BuildError`; `cli` prints it and nothing else. The table of symptoms turns
the output of a failed tool (pip, the compiler) into such a pair where the cause is a well-known one.
"""

from __future__ import annotations

import errno
import re


class BuildError(Exception):
    """Horovod cannot be built, installed or verified: `problem` says why and `remedy` what to do about it."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}\n  what to do: {remedy}")
        self.problem = problem
        self.remedy = remedy


DISK_FULL = (
    "the disk is full",
    "free some space, or name a folder on a larger disk with --cache-dir, and run the same command again",
)

_ERROR_LINE = re.compile(r"\berror\b|\bfatal\b|undefined reference", re.IGNORECASE)
_SYMPTOMS = (
    (r"No space left on device|Disk quota exceeded", DISK_FULL),
    (
        r"Killed signal terminated program|virtual memory exhausted|Cannot allocate memory|out of memory allocating",
        ("the machine ran out of memory while compiling", "run again with --jobs 1, or with fewer programs open"),
    ),
    (
        r"externally-managed-environment",
        (
            "this Python belongs to the operating system, which forbids installing into it",
            "make a virtual environment (python3 -m venv .venv), install the frameworks there and use its Python",
        ),
    ),
    (
        r"Permission denied|Read-only file system",
        (
            "a file or folder may not be written",
            "use a virtual environment of your own and a writable --cache-dir",
        ),
    ),
    (
        r"Unable to find address for: ",
        (
            "this machine's own name has no address, which Gloo asks for",
            'add it: echo "127.0.1.1 $(hostname)" >>/etc/hosts (as root), or apt-get install libnss-myhostname',
        ),
    ),
)


def known_symptom(output: str) -> tuple[str, str] | None:
    """The problem and remedy behind a failed tool's output, or None where it shows no well-known symptom."""
    return next((meaning for pattern, meaning in _SYMPTOMS if re.search(pattern, output)), None)


def last_errors(output: str, count: int = 6) -> str:
    """The last lines of a tool's output that speak of an error, indented; the very last ones where none does."""
    lines = [line.strip()[:300] for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR_LINE.search(line)]
    return "\n".join("    " + line for line in (errors or lines)[-count:])


def from_os_error(error: OSError) -> BuildError:
    """The `BuildError` for a file operation that failed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BuildError(*DISK_FULL)
    meaning = known_symptom(str(error))
    problem, remedy = meaning or ("a file operation failed", "put that right and run the same command again")
    return BuildError(f"{problem}: {error}", remedy)
