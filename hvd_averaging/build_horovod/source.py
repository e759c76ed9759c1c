"""Horovod's source: fetched through pip, so that the user's own index settings hold, and checked against its hash."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
from importlib.util import find_spec
from pathlib import Path

from hvd_averaging.build_horovod.errors import BuildError, known_symptom, last_errors

HOROVOD_VERSION = "0.28.1"
SDIST_NAME = f"horovod-{HOROVOD_VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

# What `setup.py` of that release imports.
_BUILD_PACKAGES = ("setuptools", "wheel", "packaging")


def require_build_packages() -> None:
    """Raise `BuildError` where a Python package is missing without which pip cannot handle Horovod's source."""
    if find_spec("pip") is None:
        raise BuildError("this Python has no pip", f"run: {sys.executable} -m ensurepip")
    missing = [name for name in _BUILD_PACKAGES if find_spec(name) is None]
    if missing:
        raise BuildError(
            f"this Python lacks {', '.join(missing)}, needed to build Horovod",
            f"run: {sys.executable} -m pip install {' '.join(missing)}",
        )


def sdist(folder: Path) -> Path:
    """The checked source archive in `folder`, fetched if it is not there yet.

    Raises:
        BuildError: it cannot be fetched, or what pip brought is not the pinned release.
    """
    kept = folder / SDIST_NAME
    if kept.is_file() and _sha256(kept) == SDIST_SHA256:
        return kept
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as download:
        return _download(Path(download), folder).replace(kept)


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the source archive into the new folder `folder`; returns its top folder."""
    with tarfile.open(archive) as tar:
        # The content is pinned by its hash. Pythons before 3.10.12 and 3.11.4 do not know `filter` yet.
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
        else:
            tar.extractall(folder)
    return folder / SDIST_NAME.removesuffix(".tar.gz")


def _download(into: Path, kept: Path) -> Path:
    # pip runs the archive's own setup.py to read its metadata; told the hash, it first makes sure of what it runs.
    requirement = into / "requirement.txt"
    requirement.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SDIST_SHA256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    # A build environment of pip's own would be one more download, and not see what is installed here.
    command = [*pip, "--no-binary", ":all:", "--no-build-isolation", "--dest", str(into), "-r", str(requirement)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    fetched = into / SDIST_NAME
    if done.returncode == 0 and fetched.is_file():
        return fetched
    raise BuildError(*(_hash_mismatch(done.stderr) or known_symptom(done.stderr) or _not_fetched(done.stderr, kept)))


def _hash_mismatch(said: str) -> tuple[str, str] | None:
    actual = re.search(r"DO NOT MATCH THE HASHES.*\bGot +(\w+)", said, re.DOTALL)
    if actual is None:
        return None
    return (
        f"{SDIST_NAME}, as pip got it, is not the release we know: its SHA-256 is {actual[1]}, not {SDIST_SHA256}",
        "check the index and the folders that pip is configured to use; nothing was run or built from that file",
    )


def _not_fetched(said: str, kept: Path) -> tuple[str, str]:
    return (
        f"pip could not fetch Horovod {HOROVOD_VERSION}; it said:\n{last_errors(said)}",
        f"go online or check pip's index settings; or put {SDIST_NAME} into {kept} yourself, and run again",
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
