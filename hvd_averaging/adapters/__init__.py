"""The few verbs that differ per framework, and how the right adapter is found.

An adapter is found by looking at what the caller passed in, and only among frameworks that are already imported, so
this package never imports one by itself. Adding a framework means writing one module with the verbs of
:class:`Adapter` and naming it in ``_ADAPTERS``; nothing else knows which frameworks exist.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from ..companions import Companion
from ..layout import Bucket, Entry
from ..members import Members

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ADAPTERS = {"torch": "TorchAdapter", "tensorflow": "TensorFlowAdapter"}
"""Framework (as imported) to the class of its adapter, which lives in the module of the framework's name."""

Function = TypeVar("Function", bound=Callable[..., Any])

_adapters: dict[str, Adapter] = {}


class Pending(Protocol):
    """A collective under way."""

    def wait(self, timeout: float | None) -> bool:
        """Sleep until it is done, for ``timeout`` seconds at most; whether it is."""

    def result(self) -> Sequence[Any]:
        """The outcome; called once, when done. Raises ``HorovodInternalError`` when the collective failed."""


@dataclass(frozen=True)
class Terms:
    """On what terms a round goes on, once the headers are known.

    ``contributes``: whether this rank brings its tensors, or only takes over the mean; ``contributors``: how many
    ranks do; ``complete``: whether all ranks of the process set are there, none of them in ``hvd.join()``, and the
    caller wants no better than an approximate mean.
    """

    contributes: bool
    contributors: int
    complete: bool


class Reduction(Protocol):
    """The buffers of one layout on one process set, used again in every round."""

    @property
    def overwrites(self) -> bool:
        """Whether parameters are changed before all is reduced, so that they are lost if that fails."""

    @property
    def bytes(self) -> int:
        """What this rank has handed to the collectives of the last round, headers aside."""

    @property
    def history(self) -> int:
        """What a rank that was away has missed: how many rounds others rest on, or 0 if none does."""

    def start(self, tensors: Sequence[Any] | None, header: Sequence[float]) -> Pending:
        """Begin to sum ``header`` over the process set, which is the result, and if nothing has to wait ``tensors``.

        With ``None`` for the tensors, this rank contributes zeros.
        """

    def rest(self, tensors: Sequence[Any], terms: Terms) -> Pending | None:
        """Begin what has to wait until all headers are known to be sound; ``None`` if there is nothing."""

    def write(self, tensors: Sequence[Any], contributors: int) -> None:
        """Write the mean over ``contributors`` ranks into ``tensors``, in place."""

    def abandon(self) -> None:
        """Nobody waits any more: should the collective come to an end after all, nothing may be written."""


class DelayedReduction(Reduction, Protocol):
    """A reduction of a copy, which :meth:`start` takes, while training goes on."""

    def add_change(self, tensors: Sequence[Any], contributors: int) -> None:
        """Add to ``tensors`` the mean over ``contributors`` ranks minus the copy."""

    def copies(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """The copy, as tensors like ``tensors``."""


class WireReduction(Reduction, Protocol):
    """A reduction of changes since the last agreed weights, in fewer bytes."""

    def state(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Tensors by the names of the entries: ``"anchor"`` and ``"residual"``; ``"shard_residuals"``, a list."""

    def restore(self, entries: Sequence[Entry], state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`; without residuals, if those are not there."""


class Adapter(Protocol):
    """What the shared code asks of a framework."""

    framework: str

    @property
    def hvd(self) -> Any:
        """Horovod's module for the framework, such as ``horovod.torch``."""

    def native(self, thing: object) -> Any:
        """``thing`` as a tensor or variable of this framework (Keras variables hold one), else ``None``."""

    def open(self, thing: object, everything: bool) -> list[Any] | None:
        """What is in a model (named tensors; with ``everything``, buffers too) or optimizer (groups), else ``None``."""

    def buffers(self, model: object) -> list[Companion] | None:
        """What a model holds besides parameters, each with the rule for averaging it; ``None`` if it is no model."""

    def takes_part(self, tensor: Any) -> bool:
        """Whether the averaging rule includes ``tensor``; must not depend on what only one rank can see."""

    def check(self, name: str, tensor: Any) -> None:
        """Raise ``TypeError`` or ``ValueError`` if ``tensor`` could not be read and written in place."""

    def identity(self, name: str, tensor: Any) -> Hashable:
        """Equal for tensors that share their elements, such as tied weights. ``TypeError`` if that cannot be told."""

    def glance(self, things: Sequence[object]) -> list[Any] | None:
        """What can be seen quickly of what ``native`` would take; ``None`` if that says too little.

        While it is equal, so are what takes part, the identities, the entries and how the tensors lie in memory.
        """

    def entry(self, name: str, tensor: Any, places: dict[Any, int]) -> Entry:
        """Describe ``tensor``; ``places`` numbers the devices seen so far and is extended."""

    def memory(self, buckets: Sequence[Bucket], tensors: Sequence[Any]) -> int:
        """A hash of how tensors lie in memory, if some buckets need not be packed; else 0."""

    def bucket_bytes(self, buckets: Sequence[Bucket]) -> int | None:
        """What measured best where ``buckets``, as large as they can be, have to be packed; ``None`` leaves them so."""

    def reduction(
        self, buckets: Sequence[Bucket], tensors: Sequence[Any], name: str, members: Members, in_place: bool
    ) -> Reduction:
        """Buffers for ``buckets``, each with room for the header, and a name for the collectives.

        With ``in_place``, all ranks found the same :meth:`memory`, which is not 0.
        """

    def delayed_reduction(
        self, buckets: Sequence[Bucket], tensors: Sequence[Any], name: str, members: Members
    ) -> DelayedReduction:
        """Like :meth:`reduction`, with a copy. Raises ``AveragingError`` if the framework cannot go on meanwhile."""

    def wire_reduction(
        self, buckets: Sequence[Bucket], tensors: Sequence[Any], name: str, members: Members, wire: str
    ) -> WireReduction:
        """Like :meth:`reduction`, in one of ``wire.WIRES``. Raises ``AveragingError`` if the framework has none."""

    def sum_integers(self, values: Sequence[int], name: str, members: Members) -> Pending:
        """Begin to sum 64-bit integers over the process set."""

    def broadcast(self, tensors: Sequence[Any], name: str, root_rank: int, members: Members) -> Pending:
        """Begin to copy the bytes of ``tensors`` from ``root_rank``; ``result`` writes them in place."""

    def copy(self, tensor: Any) -> Any:
        """A copy of the elements, to :meth:`restore` them from."""

    def restore(self, tensor: Any, copy: Any) -> None:
        """Write back what :meth:`copy` gave, in place and bit for bit."""

    def numpy(self, tensor: Any) -> NDArray[Any]:
        """The elements as an array: float64 for every floating dtype, exact for the others. May share no memory."""

    def assign(self, tensor: Any, array: NDArray[Any]) -> None:
        """Write ``array`` into ``tensor``, in place, converted to its dtype."""

    def carrier(self, array: NDArray[np.float64]) -> Any:
        """A float64 tensor on the CPU, which can be averaged, with these elements."""

    def bytes_of(self, tensor: Any) -> bytes | memoryview:
        """The elements of ``tensor`` in logical order, as bytes."""


def recorder() -> Recorder | None:
    """For when a framework is recording a graph right now, instead of doing what it is told."""
    tensorflow = sys.modules.get("tensorflow")  # None, too, where someone has forbidden its import
    if tensorflow is not None and tensorflow.inside_function():
        return cast(Recorder, _load("tensorflow"))
    return None


def outside_autograph(function: Function) -> Function:
    """Have TensorFlow's AutoGraph call ``function`` as it is, instead of translating it line by line."""
    function.autograph_info__ = {}  # type: ignore[attr-defined]
    return function


def loaded_adapters() -> list[Adapter]:
    """The adapters of the frameworks that this process has imported."""
    return [_load(framework) for framework in _ADAPTERS if sys.modules.get(framework) is not None]


class Recorder(Protocol):
    """What an adapter can do besides if its framework records graphs."""

    def counter(self, value: int) -> Any:
        """A variable that graphs can count in, with ``assign`` and ``int()``."""

    def record(
        self, counter: Any, due: Callable[[Any], Any], run: Callable[[int], object], tensors: Sequence[Any]
    ) -> None:
        """Add to the graph being recorded: count, and ``run(step)`` if ``due(step)``, after what changes ``tensors``.

        Raises:
            AveragingError: ``due`` cannot be part of a graph, or graphs could not run it.
        """


def initialized_adapter() -> Adapter | None:
    """An adapter whose Horovod is up, for when there is no tensor that would tell which one to use."""
    for adapter in loaded_adapters():
        module = sys.modules.get(f"horovod.{adapter.framework}")
        if module is not None and module.is_initialized():
            return adapter
    return None


def _load(framework: str) -> Adapter:
    if framework not in _adapters:
        module = importlib.import_module(f".{framework}", __name__)
        _adapters[framework] = getattr(module, _ADAPTERS[framework])()
    return _adapters[framework]
