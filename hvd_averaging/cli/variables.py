"""Checks of environment variables that change what Horovod and the frameworks do: a table, read top to bottom.

A variable is spoken of only where it is set. Its own documentation is Horovod's; here stands what it means for training
with this package.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass

from hvd_averaging.cli.findings import Finding, Level, error, note
from hvd_averaging.cli.launching import find_launch
from hvd_averaging.cli.survey import Survey
from hvd_averaging.process_sets import read_switch


@dataclass(frozen=True)
class Meaning:
    """What it `means` that the variable `name` is set, if it has one of `values` (empty: any value).

    Or that it is on, for a `switch` of Horovod's.
    """

    name: str
    means: str
    values: tuple[str, ...] = ()
    switch: bool = False
    level: Level = Level.NOTE
    remedy: str = ""
    lacks: str = ""


MEANINGS = (
    Meaning("HOROVOD_DYNAMIC_PROCESS_SETS", "process sets may be added after hvd.init()", switch=True),
    Meaning("HOROVOD_FUSION_THRESHOLD", "bytes that Horovod packs into one operation (default: 134217728)"),
    Meaning("HOROVOD_CYCLE_TIME", "milliseconds between two looks for work (default: 1): small rounds wait for it"),
    Meaning("HOROVOD_CACHE_CAPACITY", "no response cache: ranks negotiate every operation anew", ("0",)),
    Meaning(
        "HOROVOD_AUTOTUNE", "Horovod tries settings while it trains: the first minutes are no measure", switch=True
    ),
    Meaning("HOROVOD_HIERARCHICAL_ALLREDUCE", "sums within nodes first (NCCL): last bits may differ", switch=True),
    Meaning("HOROVOD_TORUS_ALLREDUCE", "sums within nodes first (NCCL): last bits may differ", switch=True),
    Meaning(
        "HOROVOD_DISABLE_GROUP_FUSION",
        "the buckets of a round are not packed together with anything else",
        switch=True,
    ),
    Meaning("HOROVOD_STALL_CHECK_DISABLE", "Horovod does not say which ranks it waits for", switch=True),
    Meaning("HOROVOD_STALL_CHECK_TIME_SECONDS", "seconds until Horovod complains of missing ranks (default: 60)"),
    Meaning("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "seconds until Horovod ends a job with missing ranks (0: never)"),
    Meaning("HOROVOD_GLOO_TIMEOUT_SECONDS", "seconds until Gloo gives up a peer (default: 30)"),
    Meaning("HOROVOD_THREAD_AFFINITY", "Horovod's thread of each rank is bound to a core"),
    Meaning("HOROVOD_TIMELINE", "Horovod records every operation: slower"),
    Meaning(
        "HOROVOD_MPI_THREADS_DISABLE",
        "MPI without threads: nothing else in the program may use MPI",
        switch=True,
    ),
    Meaning(
        "HOROVOD_ENABLE_XLA_OPS",
        "XLA operations, which a Horovod built by this package has not; and looking for work without a pause",
        switch=True,
        level=Level.WARNING,
        remedy="unset HOROVOD_ENABLE_XLA_OPS",
    ),
    Meaning(
        "TF_NUM_INTEROP_THREADS",
        "with one inter-op thread TensorFlow cannot run a round in a graph: it waits for itself",
        ("1",),
        level=Level.WARNING,
        remedy="export TF_NUM_INTEROP_THREADS=2",
        lacks="tensorflow",
    ),
    Meaning(
        "TF_USE_LEGACY_KERAS",
        "tf.keras is Keras 2, and hvd_averaging.keras is for Keras 3",
        ("1", "true"),
        level=Level.WARNING,
        remedy="unset TF_USE_LEGACY_KERAS, or import keras instead of tf.keras",
        lacks="keras",
    ),
    Meaning("OMP_NUM_THREADS", "threads of each rank's own arithmetic"),
    Meaning("CUDA_VISIBLE_DEVICES", "the GPUs that a rank sees"),
    Meaning("NCCL_SOCKET_IFNAME", "the network that NCCL uses"),
)


def check_variables(survey: Survey) -> Iterator[Finding]:
    """The variables that are set and matter, with their values."""
    for meaning in MEANINGS:
        value = survey.variables.get(meaning.name)
        if value is not None and _applies(meaning, value):
            yield Finding(meaning.level, meaning.name, f"{value}: {meaning.means}", meaning.remedy, meaning.lacks)
        elif value is not None and meaning.switch and read_switch(value) is None:
            said = f"{value}: Horovod reads a number here, and takes this for 0, which is off"
            yield Finding(Level.WARNING, meaning.name, said, f"export {meaning.name}=1, or unset it")
    yield from _interface(survey)
    yield from _backend(survey)


def _applies(meaning: Meaning, value: str) -> bool:
    return bool(read_switch(value)) if meaning.switch else not meaning.values or value.lower() in meaning.values


def _interface(survey: Survey) -> Iterator[Finding]:
    name = "HOROVOD_GLOO_IFACE"
    value = survey.variables.get(name)
    if value is None:
        return
    there = [interface for _, interface in socket.if_nameindex()]
    if value not in there:
        yield error(name, f"{value}: there is no such network interface", f"unset it, or use one of {', '.join(there)}")
    elif find_launch(survey.variables) is None:  # horovodrun sets it for its ranks
        yield note(name, f"{value}: the network that Gloo uses; it must be called so on every host")


def _backend(survey: Survey) -> Iterator[Finding]:
    """The variables that choose Gloo or MPI, which horovodrun also sets."""
    for name in ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"):
        value = survey.variables.get(name, "").lower()
        if value in ("gloo", "mpi") and survey.trainable and not survey.built(value):
            yield error(name, f"{value}: Horovod was built without it", f"unset {name}, or build Horovod anew")
