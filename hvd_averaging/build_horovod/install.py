"""Putting a built wheel into the running interpreter's environment, and telling whether it is already there."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from hvd_averaging.build_horovod.errors import BuildError, known_symptom


def require_installable() -> None:
    """Raise `BuildError` where pip would refuse to install: better known before a build than after it."""
    marker = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    writable = os.access(sysconfig.get_path("purelib"), os.W_OK)
    if sys.prefix == sys.base_prefix and (marker.exists() or not writable):
        raise BuildError(
            "this Python belongs to the operating system and must not be installed into",
            "make a virtual environment (python3 -m venv .venv), install the frameworks there and use its Python",
        )


def is_installed(wheel: Path) -> bool:
    """Whether Horovod here is exactly this wheel file, as pip recorded it, with none of its files gone."""
    try:
        horovod = metadata.distribution("horovod")
    except metadata.PackageNotFoundError:
        return False
    origin = json.loads(horovod.read_text("direct_url.json") or "{}").get("archive_info", {})
    same = f"sha256={hashlib.sha256(wheel.read_bytes()).hexdigest()}" == origin.get("hash")
    return same and all(Path(str(file.locate())).exists() for file in horovod.files or ())


def install(wheel: Path) -> None:
    """Install `wheel` over any other Horovod, and the Python packages it needs.

    Raises:
        BuildError: pip failed.
    """
    # Twice: forced for Horovod alone, since pip takes equal versions for equal wheels; then for what it needs.
    _pip_install("--force-reinstall", "--no-deps", str(wheel))
    _pip_install(str(wheel))


def _pip_install(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stdout + done.stderr
        problem, remedy = known_symptom(said) or (
            "pip could not install the built Horovod",
            "put right what pip complains of and run the same command again; if it is the wheel, add --force",
        )
        raise BuildError(f"{problem}\n{said.strip()}", remedy)
