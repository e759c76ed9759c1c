"""Buckets by the plan alone: nothing is allocated, so that sizes beyond this machine can be tried."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from hvd_averaging.layout import MAX_BUCKET_ELEMENTS, Entry, Layout


def entries(*shapes, dtype="float32"):
    return tuple(Entry(f"p{number}", shape, dtype) for number, shape in enumerate(shapes))


def covered(buckets, layout):
    """How often the plan touches each element, by entry."""
    counts = [np.zeros(entry.wire_shape, dtype=int) for entry in layout.entries]
    for piece in itertools.chain.from_iterable(bucket.pieces for bucket in buckets):
        assert counts[piece.entry][piece.index].shape == piece.shape
        counts[piece.entry][piece.index] += 1
    return counts


@pytest.mark.parametrize("bucket_bytes", [None, 1, 4, 12, 40, 100, 10**6])
def test_every_element_is_in_exactly_one_place(bucket_bytes):
    layout = Layout(
        (
            *entries((3, 4), (5,), (), (2, 0), (2, 3, 2)),
            Entry("double", (7,), "float64"),
            Entry("half", (3, 3), "bfloat16"),
            Entry("complex", (2, 2), "complex64"),
            Entry("gpu", (4,), "float16", "cuda", 1),
        )
    )
    buckets = layout.buckets(bucket_bytes)
    for counts in covered(buckets, layout):
        assert (counts == 1).all()
    assert all(piece.shape[-1:] == (2,) for bucket in buckets for piece in bucket.pieces if piece.entry == 7)
    for bucket in buckets:
        places = sorted((piece.start, piece.stop) for piece in bucket.pieces)
        assert places[0][0] == 0
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(places)), "no gaps, no overlap"
        assert bucket.elements == places[-1][1]
        if bucket_bytes is not None and bucket.bytes > bucket_bytes:
            assert bucket.elements <= 2, "only a single number may be larger than a bucket"


def test_dtypes_and_devices_do_not_mix():
    layout = Layout(
        (
            Entry("a", (2,), "float32"),
            Entry("b", (2,), "float64"),
            Entry("c", (2,), "float16"),
            Entry("d", (2,), "complex128"),
            Entry("e", (2,), "float32", "cuda", 1),
        )
    )
    kinds = {(b.dtype, b.device): [layout.entries[p.entry].name for p in b.pieces] for b in layout.buckets()}
    assert kinds == {("float32", "cpu"): ["a", "c"], ("float64", "cpu"): ["b", "d"], ("float32", "cuda"): ["e"]}


@pytest.mark.parametrize(
    "shape",
    [(2**31,), (2**33 + 5,), (2, 2**31), (3, 5, 2**30 + 1), (2**16, 2**16), (1, 1, 2**32)],
)
def test_a_huge_tensor_is_cut_into_buckets_that_horovod_can_count(shape):
    reserve = 37
    buckets = Layout(entries((10,), shape, (10,))).buckets(reserve=reserve)
    assert sum(bucket.elements for bucket in buckets) == math.prod(shape) + 20
    assert all(bucket.elements + reserve <= MAX_BUCKET_ELEMENTS for bucket in buckets)
    assert len(buckets) <= math.prod(shape) // 2**30 + 2, "cut no finer than needed"


def test_thousands_of_small_tensors_share_one_bucket():
    assert len(Layout(entries(*[(256,)] * 2000)).buckets()) == 1


def test_no_entries_still_make_a_bucket_to_meet_in():
    (bucket,) = Layout(()).buckets(reserve=37)
    assert bucket.elements == bucket.bytes == 0


def test_the_fingerprint_sees_name_order_shape_dtype_and_device():
    base = Entry("a", (2, 3), "float32"), Entry("b", (2, 3), "float32")
    variants = [
        base,
        base[::-1],
        base[:1],
        (Entry("a", (3, 2), "float32"), base[1]),
        (base[0], Entry("b", (2, 3), "float64")),
        (base[0], Entry("c", (2, 3), "float32")),
        (base[0], Entry("b", (2, 3), "float32", "cuda")),
        (),
    ]
    prints = [Layout(variant).fingerprint for variant in variants]
    assert len(set(prints)) == len(prints)
    assert all(0 <= value < 2**63 for value in prints), "it travels as a signed 64-bit integer"
    assert Layout(base).fingerprint == Layout(tuple(Entry(e.name, e.shape, e.dtype) for e in base)).fingerprint
