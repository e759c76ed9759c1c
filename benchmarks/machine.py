"""What a measurement was made on: without that, its milliseconds mean nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import psutil

PACKAGES = ("horovod", "torch", "tensorflow-cpu", "tensorflow", "numpy", "mpi4py")


def describe() -> dict[str, object]:
    """Processor, memory, system, versions, commit and load, for the results of a benchmark."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": versions(),
        "mpi": first_line("mpirun", "--version"),
        "commit": first_line("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
        "load_before": round(os.getloadavg()[0], 2),
    }


def processor() -> str:
    """The model name that Linux gives, where it does."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def versions() -> dict[str, str]:
    installed = importlib.metadata.distributions()
    found = {distribution.name.lower().replace("_", "-"): distribution.version for distribution in installed}
    return {package: found[package] for package in PACKAGES if package in found}


def first_line(*command: str) -> str:
    """Of what a command says; nothing if it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""
