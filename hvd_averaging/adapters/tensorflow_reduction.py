"""TensorFlow and Keras variables: one cached function sums all of them, another writes the mean back.

Horovod has no in-place allreduce for TensorFlow, and TensorFlow's tensors are always dense, so tensors are handed over
as they are, in one group per dtype, and not packed into buckets first: that would only move more memory. Collectives
run in ``tf.function``, since operations that run eagerly cannot be given names of their own.
"""

from __future__ import annotations

import queue
import re
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import tensorflow as tf

from ..header import LENGTH
from ..layout import Bucket, Piece
from ..members import Members
from . import Pending, Terms

WIRE = {"float32": tf.float32, "float64": tf.float64}


class _Helper:
    """A thread for one call after another: one that TensorFlow has not met yet costs a round up to 3 %."""

    idle: ClassVar[list[_Helper]] = []

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        # A daemon: a collective that never ends must not keep the process from ending.
        threading.Thread(target=self._run, name="hvd_averaging", daemon=True).start()

    @classmethod
    def start(cls, call: Callable[[], object]) -> None:
        """Have it called, without waiting, by a helper that is idle or else by a new one."""
        try:
            helper = cls.idle.pop()
        except IndexError:
            helper = cls()
        helper._calls.put(call)

    def _run(self) -> None:
        while True:
            self._calls.get()()
            self.idle.append(self)


class InThread:
    """A call that goes on in a thread of its own, since TensorFlow only returns from a collective when it is done."""

    def __init__(self, call: Callable[[], Sequence[Any]]) -> None:
        self._call = call
        self._outcome: Sequence[Any] = ()
        self._error: Exception | None = None
        self._done = threading.Event()
        _Helper.start(self._run)

    def _run(self) -> None:
        try:
            self._outcome = self._call()
        except Exception as error:
            self._error = error
        finally:
            del self._call  # and what it holds
            self._done.set()

    def wait(self, timeout: float | None) -> bool:
        return self._done.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))

    def result(self) -> Sequence[Any]:
        from horovod.common.exceptions import HorovodInternalError

        if isinstance(self._error, tf.errors.OpError):
            raise HorovodInternalError(_reason(self._error)) from self._error
        if self._error is not None:
            raise self._error
        return self._outcome


class Functions:
    """What is traced for a layout and a process set, once for each list of variables."""

    def __init__(self, hvd: Any, buckets: Sequence[Bucket], name: str, members: Members) -> None:
        self._hvd, self._buckets, self._members = hvd, buckets, members
        self._names = [graph_name(f"{name}.{number}of{len(buckets)}") for number in range(1, len(buckets) + 1)]
        self.size = members.size
        self.bytes = sum(bucket.bytes for bucket in buckets)
        self.average_zeros = tf.function(partial(self._mean, None), autograph=False)
        self.assign_corrected = tf.function(partial(write_back, buckets), autograph=False)
        self._traces: dict[tuple[int, ...], Callable[..., Any]] = {}

    def average(
        self, variables: Sequence[tf.Variable], abandoned: tf.Variable
    ) -> Callable[[tf.Tensor, tf.Variable], tuple[tf.Tensor, tf.Tensor, list[list[tf.Tensor]]]]:
        """What averages just these variables: to pass 161 of them at every call would take two milliseconds.

        A trace keeps their memory, though not themselves. It goes when one of them does.
        """
        key = tuple(id(variable.handle) for variable in variables)  # a trace holds these, so that no other has its id
        if key not in self._traces:
            function = tf.function(partial(self._average, variables), autograph=False)
            self._traces[key] = function.get_concrete_function(tf.TensorSpec([LENGTH]), abandoned)
            for variable in variables:
                weakref.finalize(variable, self._traces.pop, key, None)
        return self._traces[key]

    def _average(
        self, variables: Sequence[tf.Variable], header: tf.Tensor, abandoned: tf.Variable
    ) -> tuple[tf.Tensor, tf.Tensor, list[list[tf.Tensor]]]:
        """The mean header and the means; the latter are assigned at once if all headers are equal.

        Then all ranks took part, at one step, with one layout. The header holds whole numbers and their squares, so
        that wherever ranks differ the mean is off by 1/size at least, on every rank alike.
        """
        mean_header, means = self._mean(variables, header)
        equal = tf.reduce_all(tf.abs(mean_header - header) < 0.5 / self.size)
        with tf.control_dependencies([mean_header]):
            wanted = abandoned.read_value() < 1

        def assign() -> tf.Tensor:
            write_back(self._buckets, variables, means)
            return True

        return tf.cond(equal & wanted, assign, lambda: False), mean_header, means

    def _mean(
        self, variables: Sequence[tf.Variable] | None, header: tf.Tensor
    ) -> tuple[tf.Tensor, list[list[tf.Tensor]]]:
        """Horovod divides in the thread that sums, and variables take over its tensors without a copy.

        Unlike in PyTorch's adapter: a division here would need as much memory again.
        """
        groups = [
            self._hvd.mpi_ops._grouped_allreduce(
                [*pieces_of(bucket, variables), tf.cast(header, WIRE[bucket.dtype])],
                name=name,
                op=self._hvd.Average,
                ignore_name_scope=True,
                process_set=self._members.process_set,
            )
            for bucket, name in zip(self._buckets, self._names, strict=True)
        ]
        return tf.cast(groups[0][-1], tf.float32), [group[:-1] for group in groups]


def summing(hvd: Any, name: str, members: Members) -> Callable[[tf.Tensor], tf.Tensor]:
    """A traced function that sums a tensor over the process set, under this name."""
    summed = partial(
        hvd.mpi_ops._allreduce,
        name=graph_name(name),
        op=hvd.Sum,
        ignore_name_scope=True,
        process_set=members.process_set,
    )
    function: Callable[[tf.Tensor], tf.Tensor] = tf.function(summed, autograph=False)
    return function


class HeaderSum:
    """A collective of headers alone, for when ranks make sure of each other before they send anything else."""

    def __init__(self, hvd: Any, name: str, members: Members) -> None:
        self._sum = summing(hvd, name, members)

    def start(self, header: Sequence[float]) -> Pending:
        return InThread(lambda: self._sum(tf.constant(header, tf.float32)).numpy().tolist())


class TensorFlowReduction:
    """Means of the variables as they are; written at once if all ranks turn out to have been there."""

    overwrites = False
    history = 0

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._means: list[list[tf.Tensor]] = []
        self._assigned = False
        self._abandoned = tf.Variable(0, trainable=False)
        self._call: InThread | None = None

    def start(self, tensors: Sequence[Any] | None, header: Sequence[float]) -> Pending:
        variables = None if tensors is None else [value_of(tensor) for tensor in tensors]
        self._call = InThread(lambda: self._average(variables, tf.constant(header, tf.float32)))
        return self

    def _average(self, variables: Sequence[tf.Variable] | None, header: tf.Tensor) -> list[float]:
        if variables is None:
            mean, self._means = self._functions.average_zeros(header)
            self._assigned = False
        else:
            average = self._functions.average(variables, self._abandoned)
            assigned, mean, self._means = average(header, self._abandoned)
            self._assigned = bool(assigned)
        return [self._functions.size * value for value in mean.numpy().tolist()]

    def wait(self, timeout: float | None) -> bool:
        assert self._call is not None, "start comes first"
        return self._call.wait(timeout)

    def result(self) -> Sequence[float]:
        assert self._call is not None, "start comes first"
        return self._call.result()

    @property
    def bytes(self) -> int:
        return self._functions.bytes

    def rest(self, tensors: Sequence[Any], terms: Terms) -> None:
        """Nothing: the variables went along with the header."""

    def abandon(self) -> None:
        self._abandoned.assign(1)

    def write(self, tensors: Sequence[Any], contributors: int) -> None:
        if not self._assigned:
            # Horovod divided by the size of the process set, but only the contributors brought anything.
            correction = tf.constant(self._functions.size / contributors, tf.float64)
            self._functions.assign_corrected([value_of(tensor) for tensor in tensors], self._means, correction)
        self._means = []


def filled(bucket: Bucket) -> list[Piece]:
    """The pieces that have elements: nothing else needs to travel."""
    return [piece for piece in bucket.pieces if piece.stop > piece.start]


def pieces_of(bucket: Bucket, variables: Sequence[tf.Variable] | None) -> list[tf.Tensor]:
    """What the variables put into the ``filled`` pieces of the bucket; with ``None``, zeros."""
    if variables is None:
        return [tf.zeros(piece.shape, WIRE[bucket.dtype]) for piece in filled(bucket)]
    wire = ((piece.index, _to_wire(variables[piece.entry], WIRE[bucket.dtype])) for piece in filled(bucket))
    return [value[index] if index else value for index, value in wire]


def write_back(
    buckets: Sequence[Bucket],
    variables: Sequence[tf.Variable],
    means: Sequence[Sequence[tf.Tensor]],
    correction: tf.Tensor | None = None,
) -> None:
    """Give the variables the means, one for each of the ``filled`` pieces of each bucket, times the correction."""
    for bucket, group in zip(buckets, means, strict=True):
        for piece, wire in zip(filled(bucket), group, strict=True):
            variable = variables[piece.entry]
            mean = _from_wire(wire if correction is None else wire * tf.cast(correction, wire.dtype), variable.dtype)
            if piece.index:
                variable[piece.index[: variable.shape.rank]].assign(mean)
            else:
                variable.assign(mean)


def _to_wire(variable: tf.Variable, dtype: tf.DType) -> tf.Tensor:
    value = variable.read_value()
    if value.dtype.is_complex:
        return tf.stack([tf.math.real(value), tf.math.imag(value)], axis=-1)
    return tf.cast(value, dtype)


def _from_wire(mean: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype.is_complex:
        return tf.complex(mean[..., 0], mean[..., 1])
    return tf.cast(mean, dtype)


def graph_name(name: str) -> str:
    """As TensorFlow allows names of operations."""
    return re.sub(r"[^A-Za-z0-9_.>-]", "_", name)


def is_keras_variable(thing: object) -> bool:
    """Whether it is Keras's, on top of TensorFlow."""
    keras: Any = sys.modules.get("keras")
    return isinstance(thing, getattr(keras, "Variable", ())) and keras.backend.backend() == "tensorflow"


def value_of(tensor: Any) -> Any:
    """The tf.Variable in a Keras variable, past Keras's automatic casts."""
    return tensor._value if is_keras_variable(tensor) else tensor


def _reason(error: tf.errors.OpError) -> str:
    """What Horovod said, without the graph around it."""
    lines = [line for line in (error.message or str(error)).splitlines() if "Horovod" in line or "horovod" in line]
    return lines[-1].strip() if lines else str(error)
