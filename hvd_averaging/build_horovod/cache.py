"""Built wheels, kept under a key of everything that matters. A wheel appears there whole or not at all.

The folder holds:

- `sdists/`: Horovod's checked source archive
- `wheels/<key>/`: a wheel, and `build.json`, which says in words what it was built for
- `build/<key>/`: a build that is going on; swept before and after
- `logs/<key>.log`: what the compiler said, the last time
- `locks/<key>.lock`: held by the process that builds
- `nccl/`: the link to PyTorch's NCCL, of a build for GPUs
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from hvd_averaging.build_horovod.edits import fingerprint
from hvd_averaging.build_horovod.errors import DISK_FULL, BuildError
from hvd_averaging.build_horovod.source import HOROVOD_VERSION, SDIST_SHA256
from hvd_averaging.build_horovod.target import Target

# An unpacked source with its build tree takes 75 MB, with debugging and GPU code somewhat more.
_BUILD_BYTES = 250 * 2**20


def default_folder() -> Path:
    """The user's cache directory for this package."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvd_averaging"


def describe(target: Target) -> dict[str, str | None]:
    """Everything that decides what the wheel contains, by name: the content of the key and of `build.json`."""
    source = {"horovod": HOROVOD_VERSION, "sdist_sha256": SDIST_SHA256, "edits_sha256": fingerprint(target)}
    return source | asdict(target)


def key_of(target: Target) -> str:
    """The name under which wheels for `target` are kept."""
    return hashlib.sha256(json.dumps(describe(target), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Cache:
    """The cache in `folder`, seen from one `target`."""

    folder: Path
    target: Target

    @property
    def key(self) -> str:
        """The target's key."""
        return key_of(self.target)

    @property
    def sdists(self) -> Path:
        """The folder of the source archive, which all targets share."""
        return self.folder / "sdists"

    @property
    def log(self) -> Path:
        """The file with all that a build prints."""
        return self.folder / "logs" / f"{self.key}.log"

    def wheel(self) -> Path | None:
        """The kept wheel, or None."""
        return next(iter(sorted(self._shelf.glob("*.whl"))), None)

    @contextmanager
    def locked(self, on_wait: Callable[[], None]) -> Iterator[None]:
        """Keep other processes from building the same; `on_wait` is called first if one already does."""
        lock = self.folder / "locks" / f"{self.key}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def workshop(self) -> Iterator[Path]:
        """An empty folder to build in, on the cache's disk, gone afterwards. Needs the lock.

        Raises:
            BuildError: the disk has too little room for a build.
        """
        folder = self.folder / "build" / self.key
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            free = shutil.disk_usage(folder).free
            if free < _BUILD_BYTES:
                problem, remedy = DISK_FULL
                room = f"{free >> 20} MB free in {self.folder}, a build needs {_BUILD_BYTES >> 20} MB"
                raise BuildError(f"{problem}: {room}", remedy)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def keep(self, wheel: Path, facts: Mapping[str, object]) -> Path:
        """Move the finished `wheel` from the workshop to its place, described with `facts` added. Needs the lock."""
        prepared = wheel.parent / "shelf"
        prepared.mkdir()
        wheel.replace(prepared / wheel.name)
        (prepared / "build.json").write_text(json.dumps({**describe(self.target), **facts}, indent=2) + "\n")
        self._shelf.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._shelf, ignore_errors=True)
        # The one moment at which the wheel appears, together with its description.
        prepared.replace(self._shelf)
        return self._shelf / wheel.name

    @property
    def _shelf(self) -> Path:
        return self.folder / "wheels" / self.key
