"""Means of changes, in half as many bytes: as in ``torch_wire``, in one traced function for all buckets.

Operations on whole buckets, of which TensorFlow runs several at a time: one bucket is coded while another travels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ..layout import Bucket, Entry
from ..members import Members
from . import Pending, Terms
from .tensorflow_reduction import WIRE, HeaderSum, InThread, filled, graph_name, pieces_of, value_of, write_back

CODINGS = {"fp16": tf.float16, "bf16": tf.bfloat16}


class _Parcel:
    """How one bucket travels. ``anchor``, padded to equal shards, is what all ranks agreed on last."""

    def __init__(self, hvd: Any, bucket: Bucket, name: str, members: Members, coding: tf.DType) -> None:
        self._hvd, self._name, self._members, self._coding = hvd, name, members, coding
        self.bucket, self.dtype = bucket, WIRE[bucket.dtype]
        self.changes = bool(bucket.elements) and not bucket.exact
        shard = -(-bucket.elements // members.size)
        self.anchor, self.residual, self.shard_residual = (
            tf.Variable(tf.zeros([count * shard], self.dtype), trainable=False)
            for count in (members.size, members.size, 1)
        )

    def pack(self, variables: Sequence[tf.Variable] | None) -> tf.Tensor:
        flat = [tf.reshape(piece, [-1]) for piece in pieces_of(self.bucket, variables)]
        return tf.concat([*flat, tf.zeros([self.anchor.shape[0] - self.bucket.elements], self.dtype)], 0)

    def views(self) -> list[tf.Tensor]:
        """The pieces of the bucket, as the anchor has them."""
        return [tf.reshape(self.anchor[piece.start : piece.stop], piece.shape) for piece in filled(self.bucket)]

    def mean(self, variables: Sequence[tf.Variable] | None, contributors: tf.Tensor) -> None:
        """Make the mean of the variables the anchor."""
        total = self._hvd.mpi_ops._allreduce(
            self.pack(variables),
            op=self._hvd.Sum,
            name=graph_name(f"{self._name}.whole"),
            ignore_name_scope=True,
            process_set=self._members.process_set,
        )
        self.anchor.assign(total / tf.cast(contributors, self.dtype))

    def change(self, variables: Sequence[tf.Variable] | None, contributors: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """By how much the anchor is to move, and what is left out then, of this rank's change and of its shard."""
        change = tf.zeros_like(self.anchor)
        if variables is not None:
            change = self.pack(variables) - self.anchor + self.residual
        coded = tf.cast(change, self._coding)
        left_out = self.residual.read_value() if variables is None else change - tf.cast(coded, self.dtype)
        shards = self._exchange(self._hvd.alltoall, coded, self._members.size, "changes")
        mean = tf.reduce_sum(tf.cast(shards, self.dtype), 0) / tf.cast(contributors, self.dtype) + self.shard_residual
        coded_mean = tf.cast(mean, self._coding)
        moved = tf.reshape(self._exchange(self._hvd.allgather, coded_mean, 1, "means"), [-1])
        return tf.cast(moved, self.dtype), left_out, mean - tf.cast(coded_mean, self.dtype)

    def _exchange(self, operation: Callable[..., tf.Tensor], coded: tf.Tensor, rows: int, what: str) -> tf.Tensor:
        """Bytes travel, as Horovod does not know bfloat16; returns one row for each rank."""
        data = tf.reshape(tf.bitcast(coded, tf.uint8), [rows, -1])
        name = graph_name(f"{self._name}.{what}")
        received = operation(data, name=name, ignore_name_scope=True, process_set=self._members.process_set)
        return tf.bitcast(tf.reshape(received, [self._members.size, -1, 2]), self._coding)


class WireReduction:
    """Rounds of changes; the first one, and wherever the coding does not do, one of the variables as they are."""

    overwrites = False

    def __init__(self, hvd: Any, buckets: Sequence[Bucket], name: str, members: Members, wire: str) -> None:
        self._header = HeaderSum(hvd, f"{name}.header", members)
        names = [f"{name}.{number}of{len(buckets)}" for number in range(1, len(buckets) + 1)]
        with tf.init_scope():
            self._parcels = [
                _Parcel(hvd, bucket, name, members, CODINGS[wire]) for bucket, name in zip(buckets, names, strict=True)
            ]
        self._changing = [parcel for parcel in self._parcels if parcel.changes]
        self._others = [parcel for parcel in self._parcels if not parcel.changes]
        self._means = {
            kind: tf.function(partial(self._mean, parcels), autograph=False)
            for kind, parcels in (("all", self._parcels), ("others", self._others), ("changing", self._changing))
        }
        self._change = tf.function(self._move, autograph=False)
        self._write = tf.function(self._assign, autograph=False)
        self.history = 0
        self.bytes = 0

    def start(self, tensors: Sequence[Any] | None, header: Sequence[float]) -> Pending:
        return self._header.start(header)

    def rest(self, tensors: Sequence[Any], terms: Terms) -> Pending:
        variables = [value_of(tensor) for tensor in tensors] if terms.contributes else None
        count = tf.constant(float(terms.contributors), tf.float64)
        run = self._send_changes if terms.complete and self.history else self._send_whole
        return InThread(lambda: run(variables, count))

    def write(self, tensors: Sequence[Any], contributors: int) -> None:
        self._write([value_of(tensor) for tensor in tensors])
        self.history += 1

    def abandon(self) -> None:
        """Nothing to do: only :meth:`write` writes."""

    def state(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """The anchor, the same on all ranks, and what this rank's coding has left out, by the names of the entries."""
        anchor, residual = _zeros(entries), _zeros(entries)
        for parcel in self._changing:
            for named, variable in ((anchor, parcel.anchor), (residual, parcel.residual)):
                flat = variable.numpy()
                for piece in parcel.bucket.pieces:
                    named[entries[piece.entry].name][piece.index] = flat[piece.start : piece.stop].reshape(piece.shape)
        return {
            "anchor": anchor,
            "residual": residual,
            "shard_residuals": [parcel.shard_residual.numpy() for parcel in self._changing],
        }

    def restore(self, entries: Sequence[Entry], state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`; residuals that are not there, or are of other shards, are nothing."""
        for parcel in self._changing:
            for named, variable in ((state["anchor"], parcel.anchor), (state["residual"], parcel.residual)):
                flat = np.zeros(variable.shape, variable.dtype.as_numpy_dtype)
                for piece in parcel.bucket.pieces if named else ():
                    flat[piece.start : piece.stop] = named[entries[piece.entry].name][piece.index].reshape(-1)
                variable.assign(flat)
        for parcel, residual in zip(self._changing, state["shard_residuals"], strict=False):
            if residual.shape == tuple(parcel.shard_residual.shape):
                parcel.shard_residual.assign(residual)
        self.history = 1

    def _send_whole(self, variables: Sequence[tf.Variable] | None, contributors: tf.Tensor) -> Sequence[Any]:
        self._means["all"](variables, contributors)
        self.bytes = sum(parcel.bucket.bytes for parcel in self._parcels)
        return ()

    def _send_changes(self, variables: Sequence[tf.Variable] | None, contributors: tf.Tensor) -> Sequence[Any]:
        self._means["others"](variables, contributors)
        self.bytes = sum(parcel.bucket.bytes for parcel in self._others)
        self.bytes += sum(2 * int(parcel.anchor.shape[0]) for parcel in self._changing)
        if not self._change(variables, contributors):
            # Some rank's change is infinite, not a number, or too large for the coding: all ranks see that here.
            self._means["changing"](variables, contributors)
            self.bytes += sum(parcel.bucket.bytes for parcel in self._changing)
            for parcel in self._changing:
                parcel.residual.assign(tf.zeros_like(parcel.residual))
                parcel.shard_residual.assign(tf.zeros_like(parcel.shard_residual))
        return ()

    def _mean(
        self, parcels: Sequence[_Parcel], variables: Sequence[tf.Variable] | None, contributors: tf.Tensor
    ) -> None:
        for parcel in parcels:
            parcel.mean(variables, contributors)

    def _move(self, variables: Sequence[tf.Variable] | None, contributors: tf.Tensor) -> tf.Tensor:
        """Move the anchors, unless that would be by something else than finite numbers; whether it was done."""
        moves = [parcel.change(variables, contributors) for parcel in self._changing]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(moved)) for moved, *_ in moves])

        def move() -> tf.Tensor:
            for parcel, (moved, left_out, left_out_of_shard) in zip(self._changing, moves, strict=True):
                parcel.anchor.assign_add(moved)
                parcel.residual.assign(left_out)
                parcel.shard_residual.assign(left_out_of_shard)
            return True

        return tf.cond(finite, move, lambda: False)

    def _assign(self, variables: Sequence[tf.Variable]) -> None:
        write_back([parcel.bucket for parcel in self._parcels], variables, [parcel.views() for parcel in self._parcels])


def _zeros(entries: Sequence[Entry]) -> dict[str, NDArray[Any]]:
    return {
        entry.name: np.zeros(entry.wire_shape, WIRE[entry.wire_dtype].as_numpy_dtype)
        for entry in entries
        if not entry.exact
    }
