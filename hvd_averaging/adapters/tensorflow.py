"""TensorFlow and Keras variables: one cached function sums all of them, another writes the mean back.

Horovod has no in-place allreduce for TensorFlow, and TensorFlow's tensors are always dense, so tensors are handed over
as they are, in one group per dtype, and not packed into buckets first: that would only move more memory. Collectives
run in ``tf.function``, since operations that run eagerly cannot be given names of their own.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ..companions import Companion, Rule
from ..errors import AveragingError
from ..layout import Bucket, Entry, Piece
from ..members import Members
from . import DelayedReduction, Pending, WireReduction

_WIRE = {"float32": tf.float32, "float64": tf.float64}
_LONGEST_BLOCK = 2**31 - 1  # bytes in one broadcast


class TensorFlowAdapter:
    """The verbs of :class:`hvd_averaging.adapters.Adapter` for TensorFlow, and for Keras 3 on top of it."""

    framework = "tensorflow"

    def __init__(self) -> None:
        self._sums: dict[Hashable, Callable[[Any], Any]] = {}
        self._functions: dict[Hashable, _Functions] = {}

    @property
    def hvd(self) -> Any:
        import horovod.tensorflow

        return horovod.tensorflow

    def native(self, thing: object) -> Any:
        return thing if isinstance(thing, (tf.Variable, tf.Tensor)) or _is_keras_variable(thing) else None

    def open(self, thing: object, everything: bool) -> list[Any] | None:
        keras = sys.modules.get("keras")
        if not isinstance(thing, (tf.Module, getattr(keras, "Layer", tf.Module))):
            return None
        variables = list(thing.variables if everything else thing.trainable_variables)
        if not variables and getattr(thing, "built", True) is False:
            raise ValueError(
                f"The model {getattr(thing, 'name', thing)!r} has no variables yet: call it on one batch, or "
                "model.build(input_shape), on every rank first."
            )
        return [(_stable_name(number, variable), variable) for number, variable in enumerate(variables)]

    def buffers(self, model: object) -> list[Companion] | None:
        opened = self.open(model, everything=True)
        if opened is None:
            return None
        named = {id(_value(variable)): (name, variable) for name, variable in opened}
        means = {}
        for layer in _layers(model):
            mean, variance = getattr(layer, "moving_mean", None), getattr(layer, "moving_variance", None)
            if id(_value(mean)) in named and id(_value(variance)) in named:  # variables both, of this model
                means[id(_value(variance))] = Companion(*named[id(_value(mean))], Rule.VARIANCE)
        centers = {id(_value(center.tensor)) for center in means.values()}
        return [
            Companion(name, variable, _rule(variable, key in means), means.get(key))
            for key, (name, variable) in named.items()
            if not variable.trainable and key not in centers
        ]

    def takes_part(self, tensor: Any) -> bool:
        dtype = tf.as_dtype(tensor.dtype)
        # A bare tf.Tensor takes part only to be refused by `check`.
        return (dtype.is_floating or dtype.is_complex) and bool(getattr(tensor, "trainable", True))

    def check(self, name: str, tensor: Any) -> None:
        if isinstance(tensor, tf.Tensor):
            raise TypeError(f"{name!r} is a tf.Tensor, which cannot be updated in place: pass the tf.Variable.")
        if _is_keras_variable(tensor) and tensor._value is None:
            raise ValueError(f"{name!r} has no value yet: build the model on every rank first.")
        if _value(tensor).__class__.__name__ not in (
            "ResourceVariable",
            "UninitializedVariable",
            "UnliftedInitializerVariable",
        ):
            kind = type(_value(tensor)).__name__
            raise TypeError(f"{name!r} is a {kind}: only variables that live whole in one process can be averaged.")
        if not _value(tensor).shape.is_fully_defined():
            raise ValueError(f"{name!r} has the shape {_value(tensor).shape}, but averaging needs a fixed one.")
        if tf.as_dtype(tensor.dtype) == tf.string:
            raise TypeError(f"{name!r} holds strings, which cannot travel between ranks.")

    def identity(self, name: str, tensor: Any) -> Hashable:
        return id(_value(tensor)), tensor.shape, tensor.dtype

    def entry(self, name: str, tensor: Any, places: dict[Any, int]) -> Entry:
        device = _value(tensor).device
        place = places.setdefault(device, len(places))
        kind = tf.DeviceSpec.from_string(device).device_type or "cpu"
        return Entry(name, tuple(tensor.shape), tf.as_dtype(tensor.dtype).name, kind.lower(), place)

    def memory(self, buckets: Sequence[Bucket], tensors: Sequence[Any]) -> int:
        return 0

    def reduction(
        self, buckets: Sequence[Bucket], tensors: Sequence[Any], name: str, members: Members, in_place: bool
    ) -> _TensorFlowReduction:
        plan = tuple((bucket.dtype, bucket.elements) for bucket in buckets)
        key = (name, plan, members.process_set.process_set_id)
        if key not in self._functions:
            self._functions[key] = _Functions(self.hvd, buckets, name, members)
        return _TensorFlowReduction(self._functions[key])

    def delayed_reduction(
        self, buckets: Sequence[Bucket], tensors: Sequence[Any], name: str, members: Members
    ) -> DelayedReduction:
        raise AveragingError("delay works with PyTorch only, so far: use delay=0.")

    def wire_reduction(
        self, buckets: Sequence[Bucket], tensors: Sequence[Any], name: str, members: Members, wire: str
    ) -> WireReduction:
        raise AveragingError(f"wire={wire!r} works with PyTorch only, so far: use wire=None.")

    def sum_integers(self, values: Sequence[int], name: str, members: Members) -> Pending:
        key = (name, len(values), members.process_set.process_set_id)
        if key not in self._sums:
            summed = partial(
                self.hvd.mpi_ops._allreduce,
                name=_graph_name(name),
                op=self.hvd.Sum,
                ignore_name_scope=True,
                process_set=members.process_set,
            )
            self._sums[key] = tf.function(summed, autograph=False)
        return _InThread(lambda: self._sums[key](tf.constant(values, tf.int64)).numpy().tolist())

    def broadcast(self, tensors: Sequence[Any], name: str, root_rank: int, members: Members) -> Pending:
        variables = [_value(tensor) for tensor in tensors]
        return _InThread(lambda: _broadcast(self.hvd, variables, name, root_rank, members))

    def copy(self, tensor: Any) -> tf.Tensor:
        return tf.identity(_value(tensor))

    def restore(self, tensor: Any, copy: tf.Tensor) -> None:
        _value(tensor).assign(copy)

    def counter(self, value: int) -> tf.Variable:
        with tf.init_scope():
            return tf.Variable(value, dtype=tf.int64, trainable=False, name="averager_step")

    def record(
        self, counter: Any, due: Callable[[Any], Any], run: Callable[[int], object], tensors: Sequence[Any]
    ) -> None:
        if _inter_op_threads() < 2:
            raise AveragingError(
                "A round inside a tf.function needs a second TensorFlow thread, or it would wait for itself: call "
                "tf.config.threading.set_inter_op_parallelism_threads(2) at the start, or average outside."
            )
        step = counter.read_value()
        try:
            now = tf.convert_to_tensor(due(step), tf.bool)
        except (TypeError, ValueError) as error:
            raise AveragingError(
                f"The schedule cannot be part of a graph ({error}). Write due() with & and | for `and` and `or` and "
                "without `if`, or call average_parameters outside the tf.function."
            ) from error
        # The handles are passed only for order: the round comes after everything that the graph did to the variables
        # before, and ahead of everything after.
        handles = [_value(tensor).handle for tensor in tensors]

        def average() -> tf.Tensor:
            tf.py_function(lambda step, *_: run(int(step)) and None, [step, *handles], [])
            return step

        done = tf.cond(now, average, lambda: step)
        with tf.control_dependencies([done]):  # a round that failed is not counted
            counter.assign_add(1)

    def numpy(self, tensor: Any) -> NDArray[Any]:
        value = _value(tensor).read_value()
        array: NDArray[Any] = (tf.cast(value, tf.float64) if value.dtype.is_floating else value).numpy()
        return np.array(array)

    def assign(self, tensor: Any, array: NDArray[Any]) -> None:
        variable = _value(tensor)
        variable.assign(tf.cast(tf.reshape(tf.constant(array), variable.shape), variable.dtype))

    def carrier(self, array: NDArray[np.float64]) -> tf.Variable:
        return tf.Variable(array)

    def bytes_of(self, tensor: Any) -> bytes:
        data: bytes = _value(tensor).numpy().tobytes()
        return data


def _inter_op_threads() -> int:
    """How many operations TensorFlow can run at a time; it takes one thread per core unless told otherwise."""
    configured = tf.config.threading.get_inter_op_parallelism_threads()
    return configured or int(os.environ.get("TF_NUM_INTEROP_THREADS") or 0) or os.cpu_count() or 1


class _InThread:
    """A call that goes on in a thread of its own, since TensorFlow only returns from a collective when it is done."""

    def __init__(self, call: Callable[[], Sequence[Any]]) -> None:
        self._call = call
        self._outcome: Sequence[Any] = ()
        self._error: Exception | None = None
        # A daemon: a collective that never ends must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="hvd_averaging", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome = self._call()
        except Exception as error:
            self._error = error

    def wait(self, timeout: float | None) -> bool:
        self._thread.join(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        return not self._thread.is_alive()

    def result(self) -> Sequence[Any]:
        from horovod.common.exceptions import HorovodInternalError

        if isinstance(self._error, tf.errors.OpError):
            raise HorovodInternalError(_reason(self._error)) from self._error
        if self._error is not None:
            raise self._error
        return self._outcome


class _Functions:
    """What is traced once for a layout and a process set, whichever variables of that layout are passed in."""

    def __init__(self, hvd: Any, buckets: Sequence[Bucket], name: str, members: Members) -> None:
        self._hvd, self._buckets, self._members = hvd, buckets, members
        self._names = [_graph_name(f"{name}.{number}of{len(buckets)}") for number in range(1, len(buckets) + 1)]
        self.size = members.size
        self.bytes = sum(bucket.bytes for bucket in buckets)
        self.average = tf.function(self._average, autograph=False)
        self.average_zeros = tf.function(partial(self._mean, None), autograph=False)
        self.assign_corrected = tf.function(partial(_assign, buckets), autograph=False)
        self._traces: dict[tuple[bool, ...], Callable[..., Any]] = {}

    def trace(
        self, variables: Sequence[tf.Variable], header: tf.Tensor, abandoned: tf.Variable
    ) -> Callable[..., tuple[tf.Tensor, tf.Tensor, list[list[tf.Tensor]]]]:
        """``average`` without its search for a trace that fits, which takes a millisecond for 161 variables.

        The layout says all that tells variables apart there, except whether they were trainable when they were made.
        """
        key = tuple(variable.trainable for variable in variables)
        if key not in self._traces:
            self._traces[key] = self.average.get_concrete_function(variables, header, abandoned)
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
            _assign(self._buckets, variables, means)
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
                [*_pieces(bucket, variables), tf.cast(header, _WIRE[bucket.dtype])],
                name=name,
                op=self._hvd.Average,
                ignore_name_scope=True,
                process_set=self._members.process_set,
            )
            for bucket, name in zip(self._buckets, self._names, strict=True)
        ]
        return tf.cast(groups[0][-1], tf.float32), [group[:-1] for group in groups]


class _TensorFlowReduction:
    overwrites = False
    history = 0

    def __init__(self, functions: _Functions) -> None:
        self._functions = functions
        self._means: list[list[tf.Tensor]] = []
        self._assigned = False
        self._abandoned = tf.Variable(0, trainable=False)
        self._call: _InThread | None = None

    def start(self, tensors: Sequence[Any] | None, header: Sequence[float]) -> Pending:
        variables = None if tensors is None else [_value(tensor) for tensor in tensors]
        self._call = _InThread(lambda: self._average(variables, tf.constant(header, tf.float32)))
        return self

    def _average(self, variables: Sequence[tf.Variable] | None, header: tf.Tensor) -> list[float]:
        if variables is None:
            mean, self._means = self._functions.average_zeros(header)
            self._assigned = False
        else:
            average = self._functions.trace(variables, header, self._abandoned)
            assigned, mean, self._means = average(variables, header, self._abandoned)
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

    def rest(self, tensors: Sequence[Any] | None, contributors: int, complete: bool) -> None:
        """Nothing: the variables went along with the header."""

    def abandon(self) -> None:
        self._abandoned.assign(1)

    def write(self, tensors: Sequence[Any], contributors: int) -> None:
        if not self._assigned:
            # Horovod divided by the size of the process set, but only the contributors brought anything.
            correction = tf.constant(self._functions.size / contributors, tf.float64)
            self._functions.assign_corrected([_value(tensor) for tensor in tensors], self._means, correction)
        self._means = []


def _filled(bucket: Bucket) -> list[Piece]:
    """The pieces that have elements: nothing else needs to travel."""
    return [piece for piece in bucket.pieces if piece.stop > piece.start]


def _pieces(bucket: Bucket, variables: Sequence[tf.Variable] | None) -> list[tf.Tensor]:
    if variables is None:
        return [tf.zeros(piece.shape, _WIRE[bucket.dtype]) for piece in _filled(bucket)]
    wire = ((piece.index, _to_wire(variables[piece.entry], _WIRE[bucket.dtype])) for piece in _filled(bucket))
    return [value[index] if index else value for index, value in wire]


def _assign(
    buckets: Sequence[Bucket],
    variables: Sequence[tf.Variable],
    means: Sequence[Sequence[tf.Tensor]],
    correction: tf.Tensor | None = None,
) -> None:
    for bucket, group in zip(buckets, means, strict=True):
        for piece, wire in zip(_filled(bucket), group, strict=True):
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


def _broadcast(
    hvd: Any, variables: Sequence[tf.Variable], name: str, root_rank: int, members: Members
) -> Sequence[tf.Variable]:
    """Bytes travel, so that every dtype arrives bit for bit."""
    flat = tf.concat([_as_bytes(variable.read_value()) for variable in variables] or [tf.zeros([0], tf.uint8)], 0)
    starts = range(0, max(1, flat.shape[0]), _LONGEST_BLOCK)
    blocks = [
        tf.function(
            partial(
                hvd.broadcast,
                flat[start : start + _LONGEST_BLOCK],
                root_rank,
                name=_graph_name(f"{name}.{number}of{len(starts)}"),
                ignore_name_scope=True,
                process_set=members.process_set,
            ),
            autograph=False,
        )()
        for number, start in enumerate(starts, 1)
    ]
    flat, start = tf.concat(blocks, 0), 0
    for variable in variables:
        stop = start + int(tf.size(_as_bytes(variable.read_value())))
        variable.assign(_from_bytes(flat[start:stop], variable.dtype, variable.shape))
        start = stop
    return variables


def _layers(model: Any) -> list[Any]:
    """All layers in a Keras model, however deep; those of a ``tf.Module`` cannot be told to normalize."""
    return list(model._flatten_layers()) if hasattr(model, "_flatten_layers") else []


def _rule(variable: Any, is_variance: bool) -> Rule:
    dtype = tf.as_dtype(variable.dtype)
    if is_variance:
        return Rule.VARIANCE
    if dtype.is_floating or dtype.is_complex:
        return Rule.MEAN
    return Rule.MAXIMUM if dtype.is_integer and len(variable.shape) == 0 else Rule.KEEP


def _graph_name(name: str) -> str:
    """As TensorFlow allows names of operations."""
    return re.sub(r"[^A-Za-z0-9_.>-]", "_", name)


def _as_bytes(value: tf.Tensor) -> tf.Tensor:
    if value.dtype == tf.bool:
        value = tf.cast(value, tf.uint8)
    return tf.reshape(tf.bitcast(value, tf.uint8), [-1])


def _from_bytes(data: tf.Tensor, dtype: tf.DType, shape: tf.TensorShape) -> tf.Tensor:
    if dtype == tf.bool:
        return tf.cast(tf.reshape(data, shape), tf.bool)
    if dtype.size == 1:
        return tf.bitcast(tf.reshape(data, shape), dtype)
    return tf.bitcast(tf.reshape(data, [*shape, dtype.size]), dtype)


def _is_keras_variable(thing: object) -> bool:
    keras: Any = sys.modules.get("keras")
    return isinstance(thing, getattr(keras, "Variable", ())) and keras.backend.backend() == "tensorflow"


def _value(tensor: Any) -> Any:
    """The tf.Variable in a Keras variable, past Keras's automatic casts."""
    return tensor._value if _is_keras_variable(tensor) else tensor


def _stable_name(number: int, variable: Any) -> str:
    """Without what depends on this process: the counters that Keras adds to names, the path before layer and weight."""
    path = "/".join(getattr(variable, "path", variable.name).split("/")[-2:])  # a loaded model's path is shorter
    return f"{number} {re.sub(r'_[0-9]+(?=/|$)', '', path)}"


def _reason(error: tf.errors.OpError) -> str:
    """What Horovod said, without the graph around it."""
    lines = [line for line in (error.message or str(error)).splitlines() if "Horovod" in line or "horovod" in line]
    return lines[-1].strip() if lines else str(error)
