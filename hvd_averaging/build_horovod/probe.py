"""One Horovod rank that averages a tensor: `python probe.py torch|tensorflow CONTROLLER...`.

Run in a process of its own by `verify`, as text: so it knows nothing of this package.
"""

from __future__ import annotations

import importlib
import os
import sys


def main(framework: str, *controllers: str) -> None:
    """Average ones over a single rank, under each of the controllers ("gloo", "mpi") in turn."""
    library = importlib.import_module(framework)
    horovod = importlib.import_module("horovod." + framework)
    for controller in controllers:
        os.environ["HOROVOD_CONTROLLER"] = os.environ["HOROVOD_CPU_OPERATIONS"] = controller
        horovod.init()
        average = horovod.allreduce(library.ones(3), name="probe").numpy().tolist()
        enabled = {"gloo": horovod.gloo_enabled, "mpi": horovod.mpi_enabled}[controller]()
        horovod.shutdown()
        if not enabled or average != [1.0, 1.0, 1.0]:
            sys.exit(f"{controller}: enabled {enabled}, the mean of [1, 1, 1] over one rank came out as {average}")


if __name__ == "__main__":
    main(*sys.argv[1:])
