"""Checks of what is installed: Python, PyTorch, TensorFlow, Keras, and a Horovod that was compiled for them."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator

from hvd_averaging import __version__
from hvd_averaging.build_horovod.host import unsupported_host
from hvd_averaging.build_horovod.target import release
from hvd_averaging.cli.findings import Finding, error, note, ok, warning
from hvd_averaging.cli.probing import Probed, State
from hvd_averaging.cli.survey import BACKENDS, FRAMEWORKS, Survey

# The oldest versions that setup.py asks for.
OLDEST = {"torch": (2, 1), "tensorflow": (2, 16)}
KERAS_BACKENDS = ("tensorflow", "torch")
BUILD = "hvd-averaging build-horovod"
REBUILD = f"{BUILD} --force"


def check_python(survey: Survey) -> Iterator[Finding]:
    """The interpreter and this package."""
    yield ok("hvd_averaging", __version__)
    found = f"{platform.python_version()} ({sys.executable})"
    reason = unsupported_host(sys.version_info[:2], sys.implementation.name, sys.platform)
    problem, _, remedy = reason.partition("\n  what to do: ")
    yield warning("Python", f"{found}: {problem}", remedy) if reason else ok("Python", found)


def check_frameworks(survey: Survey) -> Iterator[Finding]:
    """PyTorch and TensorFlow, of which one has to be there."""
    for name, title in FRAMEWORKS.items():
        yield _framework(name, title, survey.parts[name])
    if all(survey.parts[name].state is State.MISSING for name in FRAMEWORKS):
        yield error("frameworks", "neither PyTorch nor TensorFlow is installed", "pip install 'hvd-averaging[torch]'")


def _framework(name: str, title: str, probed: Probed) -> Finding:
    install = f"pip install 'hvd-averaging[{name}]'"
    if probed.state is State.MISSING:
        return note(title, "not installed", install, lacks=name)
    if not probed.works:
        return error(title, f"does not import: {probed.said}", f"put that right, or anew: {install}", lacks=name)
    version, oldest = probed.facts["version"], OLDEST[name]
    if release(version) < oldest:
        wanted = "{}.{}".format(*oldest)
        return warning(title, f"{version} is older than {wanted}, from which on this is tested", install, lacks=name)
    gpus, cuda = probed.facts["gpus"], probed.facts.get("cuda")
    return ok(title, version + (f", made for CUDA {cuda}" if cuda else "") + (f", {gpus} GPU(s)" if gpus else ""))


def check_keras(survey: Survey) -> Iterator[Finding]:
    """Keras 3, on a backend that Horovod knows."""
    keras = survey.parts["keras"]
    if keras.state is State.MISSING:
        yield note("Keras", "not installed", "for hvd_averaging.keras: pip install keras", lacks="keras")
    elif keras.works:
        yield _keras(str(keras.facts["version"]), str(keras.facts["backend"]))
        if survey.horovod and release(keras.facts["version"]) >= (3, 0):
            yield note(
                "Horovod's Keras",
                "horovod.keras and horovod.tensorflow.keras do not work with Keras 3",
                "use hvd_averaging.keras: the same callbacks, and DistributedOptimizer",
            )
    elif keras.state is State.BROKEN:
        remedy = "put that right; KERAS_BACKEND names the framework that Keras uses"
        yield warning("Keras", f"does not import: {keras.said}", remedy, lacks="keras")


def _keras(version: str, backend: str) -> Finding:
    if release(version) < (3, 0):
        problem = f"{version} is the wrong Keras: hvd_averaging.keras is for Keras 3"
        return warning("Keras", problem, "pip install 'keras>=3'", lacks="keras")
    if backend not in KERAS_BACKENDS:
        problem = f"{version} on the backend {backend}, for which there is no Horovod"
        return warning("Keras", problem, f"export KERAS_BACKEND={KERAS_BACKENDS[0]}", lacks="keras")
    return ok("Keras", f"{version} on {backend}")


def check_horovod(survey: Survey) -> Iterator[Finding]:
    """Horovod, its halves for the frameworks that are there, and its backends."""
    if survey.horovod is None:
        yield error("Horovod", "not installed", BUILD)
        return
    yield ok("Horovod", survey.horovod)
    present = [name for name in FRAMEWORKS if survey.parts[name].works]
    for name in present:
        yield from _half(survey, name)
    if survey.trainable:
        yield from _backends(survey)
    elif present:
        yield error("Horovod", "does not work with any framework that is installed", REBUILD)


def _half(survey: Survey, name: str) -> Iterator[Finding]:
    """Horovod's half for one framework that itself works."""
    half, about = survey.parts[f"horovod.{name}"], f"Horovod, {FRAMEWORKS[name]}"
    compiled, installed = survey.compiled_for.get(name), str(survey.parts[name].facts["version"])
    differ = f"compiled for {FRAMEWORKS[name]} {compiled}, and {installed} is installed"
    if half.works and compiled in (None, installed):
        yield ok(about, "works")
    elif half.works:
        yield warning(about, f"{differ}: it loads, but that is luck", BUILD)
    elif half.state in (State.UNBUILT, State.MISSING):
        yield warning(about, f"Horovod was compiled without {FRAMEWORKS[name]}", BUILD, lacks=name)
    elif half.state is State.BROKEN:
        cause = "" if compiled in (None, installed) else f" ({differ})"
        yield error(about, f"does not load{cause}: {half.said}", REBUILD, lacks=name)


def _backends(survey: Survey) -> Iterator[Finding]:
    remedies = {"mpi": f"install Open MPI, then {BUILD} --with-mpi", "nccl": f"{BUILD} --gpu nccl"}
    for backend, title in BACKENDS.items():
        if survey.built(backend):
            yield ok(title, "in Horovod")
        elif backend == "nccl" and survey.gpus:
            problem = f"there are GPUs ({survey.gpus}), and Horovod has no NCCL: it sums on CPUs only"
            yield warning(title, problem, remedies[backend], lacks=backend)
        else:
            yield note(title, "not in Horovod", remedies.get(backend, REBUILD), lacks=backend)
    if not (survey.built("gloo") or survey.built("mpi")):
        yield error("Horovod", "has neither Gloo nor MPI: ranks cannot talk to each other", REBUILD)
