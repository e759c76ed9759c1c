"""What the caller passed in, as an ordered list of named tensors of one framework.

This is where the rule of what is averaged is applied. It looks at nothing that differs between ranks: whether a
gradient happens to be there decides nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from .adapters import Adapter, initialized_adapter, loaded_adapters, recorder
from .companions import Companion, Rule, Together, copies
from .errors import AveragingError
from .layout import Layout

_EXAMPLES = (
    "Pass a model, model.parameters(), model.named_parameters(), an optimizer or its param_groups, a list of tensors, "
    "or a dict of them."
)

Named = tuple[str, Any]
Columns = tuple[list[str], list[Any]]
"""Names and things: columns are made and compared faster than rows, which counts where there are thousands."""


@dataclass(frozen=True)
class _Look:
    """What is seen of things at a glance (see ``Adapter.glance``), and which of them are averaged (``None``: all)."""

    names: list[str]
    glance: list[Any]
    kept: list[int] | None


@dataclass(frozen=True)
class Collected:
    """Tensors in order, the layout that describes them, and the adapter that can handle them.

    ``companions`` are what is averaged along with them, by rules of its own. ``look`` is the same object as long as
    everything is seen to be as it was.
    """

    adapter: Adapter
    tensors: Sequence[Any]
    layout: Layout
    ignored: int = 0
    signature: tuple[Any, ...] = ()
    companions: Sequence[Companion] = ()
    look: _Look | None = None

    def __add__(self, other: Collected) -> Collected:
        """Both, to be averaged in one round."""
        tensors, layout = [*self.tensors, *other.tensors], self.layout + other.layout
        return replace(self, tensors=tensors, layout=layout, look=None)


def collect(
    params: object,
    *,
    everything: bool = False,
    known: Collected | None = None,
    buffers: str = "local",
    apart: bool = False,
) -> Collected:
    """The tensors of ``params`` that are averaged, in order, tied ones once.

    Args:
        params: a model, an optimizer, its ``param_groups``, an iterable of tensors or of ``(name, tensor)`` pairs, or
            a dict of tensors.
        everything: take every tensor, frozen and integer ones and a model's buffers too (for broadcasts and checks).
        known: what was collected last time: if it is the same again, it is not looked at in detail again.
        buffers: what becomes of a model's buffers, one of ``companions.BUFFERS``.
        apart: take two tensors on one memory as two, since each has a gradient of its own.

    Raises:
        TypeError: ``params`` is or holds something else, or tensors of two frameworks.
        ValueError: a tensor that cannot be updated in place, or an iterator with nothing (left) in it.
    """
    if isinstance(params, Together):
        found = () if buffers == "local" else _buffers(params.model, buffers)
        return replace(collect(params.params, known=known), companions=[*found, *params.companions])
    companions = () if buffers == "local" else _buffers(params, buffers)
    names, things = _expand(params, everything)
    again = None if known is None else _as_before(names, things, known)
    if again is not None:
        return replace(again, companions=companions)
    adapter, named = _of_one_framework(names, things)
    kept: dict[Any, int] = {}
    for number, (name, tensor) in enumerate(named):
        if everything or adapter.takes_part(tensor):
            identity = adapter.identity(name, tensor)
            kept.setdefault((identity, id(tensor)) if apart else identity, number)
    signature = tuple((identity, named[number][0]) for identity, number in kept.items())
    same = known is not None and known.adapter is adapter and known.signature == signature
    chosen = [named[number] for number in kept.values()]
    layout = known.layout if known is not None and same else _describe(adapter, chosen)
    glance = None if apart else adapter.glance(things)
    numbers = None if len(kept) == len(named) else list(kept.values())
    look = None if glance is None else _Look(names, glance, numbers)
    tensors = [tensor for _, tensor in chosen]
    return Collected(adapter, tensors, layout, len(named) - len(kept), signature, companions, look)


def _as_before(names: list[str], things: list[Any], known: Collected) -> Collected | None:
    """What is collected if nothing has changed, which is seen in a tenth of the time that a closer look takes."""
    look = known.look
    if look is None or names != look.names or known.adapter.glance(things) != look.glance:
        return None
    return replace(known, tensors=things if look.kept is None else [things[number] for number in look.kept])


def _buffers(model: object, wanted: str) -> Sequence[Companion]:
    for adapter in loaded_adapters():
        found = adapter.buffers(model)
        if found is not None:
            companions = found if wanted == "average" else copies(found)
            for single in copies([companion for companion in companions if companion.rule is not Rule.KEEP]):
                adapter.check(single.name, single.tensor)  # here, where the other ranks still hear of it
            return companions
    raise ValueError(
        f"buffers={wanted!r} needs the model, to find its buffers in, but was given {_kind(model)}: pass the model "
        "itself instead of its parameters."
    )


def normalizes(params: object) -> bool:
    """Whether ``params`` is a model with statistics of batches in its buffers, such as those of batch normalization."""
    params = params.model if isinstance(params, Together) else params
    opened = (adapter.buffers(params) or () for adapter in loaded_adapters())
    return any(companion.rule is Rule.VARIANCE for companions in opened for companion in companions)


@contextmanager
def restoring(params: object, buffers: str = "local") -> Iterator[None]:
    """After the block everything in ``params`` that a round changes is again what it was before, bit for bit."""
    collected, _ = collect_or_explain(params, buffers=buffers)  # a failure is for the round to tell, to all ranks
    singles = [companion.tensor for companion in copies(collected.companions)]
    copied = [(tensor, collected.adapter.copy(tensor)) for tensor in [*collected.tensors, *singles]]
    try:
        yield
    finally:
        for tensor, copy in copied:
            collected.adapter.restore(tensor, copy)


def _describe(adapter: Adapter, named: Iterable[Named]) -> Layout:
    places: dict[Any, int] = {}
    entries = []
    for name, tensor in named:
        adapter.check(name, tensor)
        entries.append(adapter.entry(name, tensor, places))
    return Layout(tuple(entries))


def _expand(params: object, everything: bool) -> Columns:
    for adapter in loaded_adapters():
        if adapter.native(params) is not None:
            raise TypeError(f"A single tensor cannot be averaged on its own: put it in a list, [tensor]. {_EXAMPLES}")
        opened = adapter.open(params, everything)
        if opened is not None:
            return _expand_items(opened)
    if isinstance(params, Mapping):
        if _is_group(params):
            return _columns(_named_in_group(0, params))
        return list(map(str, params)), list(params.values())
    if isinstance(params, (str, bytes)) or not isinstance(params, Iterable):
        raise TypeError(f"Cannot average {_kind(params)}. {_EXAMPLES}")
    return _expand_items(params)


def _expand_items(params: Iterable[Any]) -> Columns:
    items = list(params)
    if not items and isinstance(params, Iterator):
        raise ValueError(
            "The iterator of parameters has nothing in it: it was used before, or the model has no parameters. Call "
            "model.parameters() afresh for every call, or pass the model or a list."
        )
    if not any(issubclass(kind, (tuple, Mapping)) for kind in set(map(type, items))):
        return _numbers(len(items)), items
    named: list[Named] = []
    for number, item in enumerate(items):
        if isinstance(item, Mapping) and _is_group(item):
            named += _named_in_group(number, item)
        elif isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
            named.append(item)
        else:
            named.append((str(number), item))
    return _columns(named)


def _columns(named: Iterable[Named]) -> Columns:
    rows = list(named)
    return [name for name, _ in rows], [thing for _, thing in rows]


@functools.lru_cache(maxsize=8)
def _numbers(count: int) -> list[str]:
    """The names of tensors that have none."""
    return list(map(str, range(count)))


def collect_or_explain(params: object, **options: Any) -> tuple[Collected, Exception | None]:
    """Like :func:`collect`, but with an error in hand instead of raised: the other ranks wait and must hear of it.

    It is raised after all where no Horovod is up that could tell them.
    """
    if recorder() is not None:
        raise AveragingError(
            "This talks to the other ranks at once and cannot be part of a graph: call it outside the tf.function. "
            "Only averager.average_parameters(...) works inside."
        )
    try:
        return collect(params, **options), None
    except (TypeError, ValueError) as error:
        adapter = initialized_adapter()
        if adapter is None:
            raise
        return Collected(adapter, (), Layout(())), error


def peek(params: object) -> tuple[object, Any]:
    """``params``, whole, and the first tensor in it (or the model or optimizer that it is); ``None`` if there is none.

    Takes the same short time however many parameters there are.
    """
    if isinstance(params, Together):
        inner, first = peek(params.params)
        return replace(params, params=inner), first
    if isinstance(params, Iterator):
        first = next(params, None)
        return (params if first is None else itertools.chain((first,), params)), _tensor_of(first)
    if isinstance(params, (list, tuple)):
        return params, _tensor_of(params[0]) if params else None
    if isinstance(params, Mapping) and not _is_group(params):
        return params, next(iter(params.values()), None)
    return params, _tensor_of(params)


def reusable(params: object) -> object:
    """``params`` for more than one look: an iterator as a list; a spent one as it is, for :func:`collect` to refuse."""
    return (list(params) or params) if isinstance(params, Iterator) else params


def _tensor_of(item: Any) -> Any:
    if isinstance(item, Mapping) and _is_group(item):
        return item["params"][0] if item["params"] else None
    return item[1] if isinstance(item, tuple) and len(item) == 2 else item


def _named_in_group(number: int, group: Mapping[str, Any]) -> Iterator[Named]:
    names = group.get("param_names")  # there when the optimizer was given named parameters
    for position, parameter in enumerate(group["params"]):
        yield (names[position] if names else f"group{number}.{position}"), parameter


def _of_one_framework(names: Sequence[str], things: Sequence[Any]) -> tuple[Adapter, list[Named]]:
    """The adapter for these tensors, and the tensors as it knows them."""
    if not things:
        adapter = initialized_adapter()
        if adapter is None:
            raise AveragingError(
                "There is nothing to average, and no Horovod is initialized to ask the other ranks whether they have "
                "something: call hvd.init() first, and pass the model's parameters."
            )
        return adapter, []
    named: dict[str, list[Named]] = {}
    adapters = loaded_adapters()
    for name, item in zip(names, things, strict=True):
        for adapter in adapters:
            tensor = adapter.native(item)
            if tensor is not None:
                named.setdefault(adapter.framework, []).append((name, tensor))
                break
        else:
            raise TypeError(f"{name!r} is {_kind(item)}, not a tensor. {_EXAMPLES}")
    if len(named) > 1:
        places = " and ".join(f"{found[0][0]!r} of {framework}" for framework, found in named.items())
        raise TypeError(f"One round averages the tensors of one framework, but there are {places}: make two averagers.")
    ((framework, tensors),) = named.items()
    return next(adapter for adapter in adapters if adapter.framework == framework), tensors


def _is_group(item: Mapping[Any, Any]) -> bool:
    return "params" in item and isinstance(item["params"], (list, tuple))


def _kind(thing: object) -> str:
    name = type(thing).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
