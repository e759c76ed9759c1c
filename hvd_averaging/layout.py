"""What is averaged: ordered names, shapes and dtypes, their fingerprint, and the buckets they travel in.

A layout is fixed before the first round and agreed by all ranks (see ``agreement``). It is plain data: nothing here
knows a framework, a tensor or a rank.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

MAX_BUCKET_ELEMENTS = 2**31 - 1
"""Horovod, MPI and NCCL count elements in a 32-bit ``int``."""

WIRE_ITEMSIZE = {"float32": 4, "float64": 8}
"""Bytes per element of the dtypes that buckets may have."""

_WIRE_DTYPE = {"float64": "float64", "complex128": "float64"}

Shape = tuple[int, ...]
Kind = tuple[int, str, str, bool]


def fingerprint(content: str | bytes | memoryview) -> int:
    """A 63-bit hash that is the same in every process (unlike ``hash``)."""
    data = content.encode() if isinstance(content, str) else content
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class Entry:
    """One parameter: its name, shape, dtype (such as ``"bfloat16"``) and kind of device (``"cpu"``, ``"cuda"``).

    ``place`` tells several devices of one process apart, by order of appearance: the number of a device may differ
    between ranks, the order may not. What shares no buckets with the parameters has places of its own, too. ``exact``
    is what must not be rounded on its way, such as counters.
    """

    name: str
    shape: Shape
    dtype: str
    device: str = "cpu"
    place: int = 0
    exact: bool = False

    def __str__(self) -> str:
        if self.place and not self.exact:  # what is exact has places of its own anyway
            where = f" on the {self.device} that is its rank's device number {self.place + 1}"
        else:
            where = "" if self.device == "cpu" else f" on {self.device}"
        return f"{self.name!r} of shape {list(self.shape)}, {self.dtype}{where}"

    @property
    def wire_dtype(self) -> str:
        """What sums are formed in: float64 for double precision, else float32 (fp16 overflows, Horovod has no bf16)."""
        return _WIRE_DTYPE.get(self.dtype, "float32")

    @property
    def wire_shape(self) -> Shape:
        """Its shape in a bucket, where a complex number is a pair of reals."""
        return (*self.shape, 2) if self.dtype.startswith("complex") else self.shape

    @property
    def bytes(self) -> int:
        """What it takes on the wire."""
        return math.prod(self.wire_shape) * WIRE_ITEMSIZE[self.wire_dtype]

    @cached_property
    def fingerprint(self) -> int:
        return fingerprint(f"{self.name}|{self.shape}|{self.dtype}|{self.device}|{self.place}")


@dataclass(frozen=True)
class Piece:
    """A block of one entry (the whole of it, unless it is larger than a bucket) and where it starts in its bucket."""

    entry: int
    index: tuple[slice, ...]
    shape: Shape
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """A flat, contiguous buffer of one dtype on one device, and what goes where in it."""

    dtype: str
    device: str
    place: int
    pieces: tuple[Piece, ...]
    exact: bool = False

    @property
    def kind(self) -> Kind:
        """What entries have in common that may share a bucket."""
        return self.place, self.device, self.dtype, self.exact

    @property
    def elements(self) -> int:
        return self.pieces[-1].stop if self.pieces else 0

    @property
    def bytes(self) -> int:
        return self.elements * WIRE_ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Layout:
    """The agreed order of parameters."""

    entries: tuple[Entry, ...]

    @cached_property
    def fingerprint(self) -> int:
        return fingerprint(",".join(str(entry.fingerprint) for entry in self.entries))

    @property
    def bytes(self) -> int:
        """What it takes on the wire."""
        return sum(entry.bytes for entry in self.entries)

    def __add__(self, other: Layout) -> Layout:
        """Both, in buckets apart, so that those of the one are the same with and without the other, which is exact."""
        first_place = 1 + max((entry.place for entry in self.entries), default=-1)
        others = (replace(entry, place=entry.place + first_place, exact=True) for entry in other.entries)
        return Layout((*self.entries, *others))

    def fragments(self, count: int) -> list[range]:
        """The numbers of the entries, in ``count`` stretches of about equally many bytes on the wire."""
        sizes = [entry.bytes for entry in self.entries]
        middles = [end - size / 2 for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
        total = max(sum(sizes), 1)
        starts = [bisect.bisect_left(middles, number * total / count) for number in range(count)]
        return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(sizes)], strict=True)]

    def buckets(self, bucket_bytes: int | None = None, reserve: int = 0) -> tuple[Bucket, ...]:
        """Cut the entries into buckets, in order.

        Args:
            bucket_bytes: the largest bucket, in bytes; ``None`` makes each as large as Horovod can count, which is
                fastest, since Horovod reduces a lone large tensor in place but copies small ones together first.
            reserve: elements to leave free at the tail of every bucket.

        Returns:
            At least one bucket, even when there are no entries: a round always meets the other ranks.

        A block is cut along its leading dimensions, so that it is a view whatever the strides of the tensor.
        """
        buckets: list[Bucket] = []
        for kind, group in itertools.groupby(
            sorted(enumerate(self.entries), key=lambda item: _kind(item[1])), key=lambda item: _kind(item[1])
        ):
            place, device, dtype, exact = kind
            limit = MAX_BUCKET_ELEMENTS - reserve
            if bucket_bytes is not None:
                limit = max(2, min(limit, bucket_bytes // WIRE_ITEMSIZE[dtype]))  # complex pairs stay together
            buckets += (Bucket(dtype, device, place, pieces, exact) for pieces in _fill(group, limit))
        return tuple(buckets) or (Bucket("float32", "cpu", 0, ()),)


def _kind(entry: Entry) -> Kind:
    return entry.place, entry.device, entry.wire_dtype, entry.exact


def _fill(entries: Iterable[tuple[int, Entry]], limit: int) -> Iterator[tuple[Piece, ...]]:
    pieces: list[Piece] = []
    for number, entry in entries:
        for index, shape in _blocks(entry.wire_shape, limit):
            start = pieces[-1].stop if pieces else 0
            if pieces and start + math.prod(shape) > limit:
                yield tuple(pieces)
                pieces, start = [], 0
            pieces.append(Piece(number, index, shape, start))
    if pieces:
        yield tuple(pieces)


def _blocks(shape: Shape, limit: int) -> Iterator[tuple[tuple[slice, ...], Shape]]:
    """Cut ``shape`` into blocks of at most ``limit`` elements along its leading dimensions."""
    if math.prod(shape) <= limit:
        yield (), shape
        return
    length, rest = shape[0], shape[1:]
    rows = limit // math.prod(rest)
    if rows:
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            yield (slice(start, stop),), (stop - start, *rest)
        return
    for row in range(length):
        for index, block in _blocks(rest, limit):
            yield (slice(row, row + 1), *index), (1, *block)
