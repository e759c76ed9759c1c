"""Running other programs, and finding them where the running interpreter's environment has them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence


def search_path() -> str:
    """PATH, led by the interpreter's own scripts: a virtual environment counts without having been activated."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])


def which(*names: str) -> str | None:
    """The full path of the first of the programs `names` that is there, or None."""
    found = (shutil.which(name, path=search_path()) for name in names)
    return next((path for path in found if path), None)


def output_of(command: Sequence[str], stdin: str = "") -> str | None:
    """What `command` prints, given the text `stdin`; None where it cannot be run or fails."""
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def base_environment() -> dict[str, str]:
    """The environment for Horovod's own programs: the user's, without Horovod settings that would change the build.

    `environment` puts those back that it knows and that the cache key therefore takes into account.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    kept["PATH"] = search_path()
    if os.geteuid() == 0:
        # Open MPI refuses root otherwise; a container has no other user.
        kept.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return kept
