"""Imports what it is told and says what came of it: `python -m hvd_averaging.cli.probe torch horovod.torch`.

Runs in a process of its own, since such an import may crash, hang or print whatever it likes. One JSON object a line
goes to standard output: first that a part is begun, then how it is.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TextIO

Facts = dict[str, Any]

# How Horovod says that it was compiled without a framework.
_UNBUILT = "has not been built"


def main(parts: list[str]) -> None:
    """Look at each of `parts` in turn."""
    # What imports print must not stand among the answers.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as channel:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        for part in parts:
            _tell(channel, part=part, state="begun")
            _tell(channel, part=part, **_look(part))


def _tell(channel: TextIO, **answer: Any) -> None:
    print(json.dumps(answer), file=channel, flush=True)


def _look(part: str) -> Facts:
    if not _is_there(part):
        return {"state": "missing"}
    try:
        return {"state": "works", "facts": _FACTS[part](importlib.import_module(part))}
    except (Exception, SystemExit) as problem:
        state = "unbuilt" if _UNBUILT in str(problem) else "broken"
        return {"state": state, "said": f"{type(problem).__name__}: {problem}"}


def _is_there(part: str) -> bool:
    # Asking for a submodule imports its parents, which need not be there, and of which only the first is light.
    return find_spec(part.partition(".")[0]) is not None


def _torch(torch: Any) -> Facts:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"version": str(torch.__version__), "cuda": torch.version.cuda, "gpus": gpus}


def _tensorflow(tensorflow: Any) -> Facts:
    return {"version": str(tensorflow.__version__), "gpus": len(tensorflow.config.list_physical_devices("GPU"))}


def _keras(keras: Any) -> Facts:
    return {"version": str(keras.__version__), "backend": str(keras.backend.backend())}


def _horovod(horovod: Any) -> Facts:
    if not hasattr(horovod, "init"):  # as Horovod leaves its torch half, when compiled without torch
        raise ImportError(f"{horovod.__name__} {_UNBUILT}")
    # NCCL tells its version; 0 stands for no NCCL.
    return {name: bool(getattr(horovod, f"{name}_built")()) for name in ("gloo", "mpi", "nccl")}


_FACTS: dict[str, Callable[[Any], Facts]] = {
    "torch": _torch,
    "tensorflow": _tensorflow,
    "keras": _keras,
    "horovod.torch": _horovod,
    "horovod.tensorflow": _horovod,
}

if __name__ == "__main__":
    main(sys.argv[1:])
