"""Checks of how ranks are started: the launchers, how this very process was started, and the cores for all of them."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvd_averaging.build_horovod.toolchain import MPI_REMEDY
from hvd_averaging.cli.findings import Finding, error, note, ok, warning
from hvd_averaging.cli.frameworks import BUILD
from hvd_averaging.cli.probing import run
from hvd_averaging.cli.survey import Survey

# Variables that launchers give to each rank: its number, how many there are, and how many on its host.
_LAUNCHERS = (
    ("horovodrun, over Gloo", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
)
_MPI = ("Open MPI", "MPICH or Intel MPI")


@dataclass(frozen=True)
class Launch:
    """How this process was started as one of several; `local_size` is None where the launcher does not tell."""

    by: str
    rank: int
    size: int
    local_size: int | None


def find_launch(variables: Mapping[str, str]) -> Launch | None:
    """What the environment says of the launcher; None for a process that was started on its own."""
    for by, rank, size, local_size in _LAUNCHERS:
        if rank in variables and size in variables:
            local = variables.get(local_size)
            return Launch(by, int(variables[rank]), int(variables[size]), int(local) if local else None)
    return None


def check_launch(survey: Survey) -> Iterator[Finding]:
    """Whether this process is one of several ranks, and Horovod will know."""
    launch = find_launch(survey.variables)
    started = "start it with: horovodrun -np 4 python train.py"
    if launch is None:
        problem = "by plain Python: a training started like this has one rank, hvd.size() is 1"
        yield note("this process", problem, f"for several, {started}", lacks="launch")
        return
    how = f"rank {launch.rank} of {launch.size}, started by {launch.by}"
    alone = f"{how}, which Horovod does not understand here: each process would be a world of its own"
    if launch.by == "torchrun":
        yield error("this process", alone, started, lacks="launch")
    elif launch.by in _MPI and survey.trainable and not survey.built("mpi"):
        yield error(
            "this process", f"{alone}, since it has no MPI", f"{started}, or {BUILD} --with-mpi", lacks="launch"
        )
    else:
        yield ok("this process", how)


def check_launcher(survey: Survey) -> Iterator[Finding]:
    """`horovodrun`, and whether it is that of this Python."""
    if survey.horovod is None:
        return
    ours, on_path = Path(sysconfig.get_path("scripts")) / "horovodrun", shutil.which("horovodrun")
    if not ours.is_file():
        yield error("horovodrun", "not among the programs of this Python", f"{BUILD} --force")
    elif on_path is None:
        yield note("horovodrun", f"not on PATH, but here: {ours}", "activate its environment, or call it by that name")
    elif not Path(on_path).samefile(ours):
        problem = f"the one on PATH belongs to another Python: {on_path}"
        yield warning("horovodrun", problem, f"activate this Python's environment, or call {ours}")
    else:
        yield ok("horovodrun", str(ours))


def check_mpirun(survey: Survey, limit: float) -> Iterator[Finding]:
    """MPI's own launcher, which Horovod with MPI needs."""
    if not survey.built("mpi"):
        return
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        problem = "not on PATH: horovodrun --mpi cannot start anything"
        level = warning if survey.built("gloo") else error
        yield level("mpirun", problem, f"{MPI_REMEDY}, or use horovodrun --gloo", lacks="mpi")
        return
    version = run([mpirun, "--version"], limit)
    if version.status != 0:
        yield warning("mpirun", f"does not run: {version.last_words}", MPI_REMEDY, lacks="mpi")
        return
    yield ok("mpirun", version.output.splitlines()[0] if version.output else mpirun)
    allow = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    unset = [name for name in allow if survey.variables.get(name) != "1"]
    if "Open MPI" in version.output and os.geteuid() == 0 and unset:
        remedy = "export " + " ".join(f"{name}=1" for name in unset)
        yield note("mpirun", "Open MPI's own mpirun refuses to run as root (horovodrun does not)", remedy)


def check_cores(survey: Survey, ranks: int | None) -> Iterator[Finding]:
    """Whether there are more ranks on this host than cores; `ranks` is how many are meant to run here, if known."""
    launch = find_launch(survey.variables)
    here = ranks or (launch.local_size if launch else None)
    if here is None:
        yield ok("cores", str(survey.cores))
    elif here <= survey.cores:
        yield ok("cores", f"{survey.cores}, for {here} rank(s)")
    else:
        yield _oversubscribed(survey, here)


def _oversubscribed(survey: Survey, here: int) -> Finding:
    wanted = {"OMP_NUM_THREADS": "1"}
    if survey.built("mpi"):
        wanted |= {"OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    unset = [f"{name}={value}" for name, value in wanted.items() if survey.variables.get(name) not in (value, "true")]
    problem = f"{here} ranks here, and {survey.cores} core(s)"
    if not unset:
        return note("cores", f"{problem}: slow, but the variables for it are set")
    return warning(
        "cores", f"{problem}: waiting ranks and threads get into each other's way", "export " + " ".join(unset)
    )
