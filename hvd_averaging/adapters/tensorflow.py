"""TensorFlow and Keras: what can be averaged, how it is described, and what else has to be asked of the framework.

How variables travel is in ``tensorflow_reduction``, and in fewer bytes in ``tensorflow_wire``.
"""

from __future__ import annotations

import operator
import os
import re
import sys
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ..companions import Companion, Rule
from ..errors import AveragingError
from ..layout import Bucket, Entry
from ..members import Members
from . import DelayedReduction, Pending
from .tensorflow_reduction import (
    Functions,
    InThread,
    TensorFlowReduction,
    graph_name,
    is_keras_variable,
    summing,
    value_of,
)
from .tensorflow_wire import CODINGS, WireReduction

_LONGEST_BLOCK = 2**31 - 1  # bytes in one broadcast
_TRAINABLE = operator.attrgetter("trainable")
_SEEN: Sequence[Callable[[tf.Variable], object]] = (
    id,
    operator.attrgetter("shape"),
    operator.attrgetter("dtype"),
    operator.attrgetter("device"),
    type,
)


class TensorFlowAdapter:
    """The verbs of :class:`hvd_averaging.adapters.Adapter` for TensorFlow, and for Keras 3 on top of it."""

    framework = "tensorflow"

    def __init__(self) -> None:
        self._sums: dict[Hashable, Callable[[Any], Any]] = {}
        self._functions: dict[Hashable, Functions] = {}

    @property
    def hvd(self) -> Any:
        import horovod.tensorflow

        return horovod.tensorflow

    def native(self, thing: object) -> Any:
        return thing if isinstance(thing, (tf.Variable, tf.Tensor)) or is_keras_variable(thing) else None

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
        named = {id(value_of(variable)): (name, variable) for name, variable in opened}
        means = {}
        for layer in _layers(model):
            mean, variance = getattr(layer, "moving_mean", None), getattr(layer, "moving_variance", None)
            if id(value_of(mean)) in named and id(value_of(variance)) in named:  # variables both, of this model
                means[id(value_of(variance))] = Companion(*named[id(value_of(mean))], Rule.VARIANCE)
        centers = {id(value_of(center.tensor)) for center in means.values()}
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
        if is_keras_variable(tensor) and tensor._value is None:
            raise ValueError(f"{name!r} has no value yet: build the model on every rank first.")
        if value_of(tensor).__class__.__name__ not in (
            "ResourceVariable",
            "UninitializedVariable",
            "UnliftedInitializerVariable",
        ):
            kind = type(value_of(tensor)).__name__
            raise TypeError(f"{name!r} is a {kind}: only variables that live whole in one process can be averaged.")
        if not value_of(tensor).shape.is_fully_defined():
            raise ValueError(f"{name!r} has the shape {value_of(tensor).shape}, but averaging needs a fixed one.")
        if tf.as_dtype(tensor.dtype) == tf.string:
            raise TypeError(f"{name!r} holds strings, which cannot travel between ranks.")

    def identity(self, name: str, tensor: Any) -> Hashable:
        return id(value_of(tensor)), tensor.shape, tensor.dtype

    def glance(self, things: Sequence[object]) -> list[Any] | None:
        try:
            variables = [value_of(thing) for thing in things]
            return [list(map(seen, variables)) for seen in _SEEN] + [list(map(_TRAINABLE, things))]
        except (AttributeError, RuntimeError, TypeError, ValueError):  # nothing for us, or a closer look says why
            return None

    def entry(self, name: str, tensor: Any, places: dict[Any, int]) -> Entry:
        device = value_of(tensor).device
        place = places.setdefault(device, len(places))
        kind = tf.DeviceSpec.from_string(device).device_type or "cpu"
        return Entry(name, tuple(tensor.shape), tf.as_dtype(tensor.dtype).name, kind.lower(), place)

    def memory(self, buckets: Sequence[Bucket], tensors: Sequence[Any]) -> int:
        return 0

    def bucket_bytes(self, buckets: Sequence[Bucket]) -> int | None:
        return None  # nothing is packed

    def reduction(
        self, buckets: Sequence[Bucket], tensors: Sequence[Any], name: str, members: Members, in_place: bool
    ) -> TensorFlowReduction:
        plan = tuple((bucket.dtype, bucket.elements) for bucket in buckets)
        key = (name, plan, members.process_set.process_set_id)
        if key not in self._functions:
            self._functions[key] = Functions(self.hvd, buckets, name, members)
        return TensorFlowReduction(self._functions[key])

    def delayed_reduction(
        self, buckets: Sequence[Bucket], tensors: Sequence[Any], name: str, members: Members
    ) -> DelayedReduction:
        raise AveragingError("delay works with PyTorch only, so far: use delay=0.")

    def wire_reduction(
        self, buckets: Sequence[Bucket], tensors: Sequence[Any], name: str, members: Members, wire: str
    ) -> WireReduction:
        if wire not in CODINGS:
            raise AveragingError(f"wire={wire!r} works with PyTorch only: use one of {', '.join(map(repr, CODINGS))}.")
        return WireReduction(self.hvd, buckets, name, members, wire)

    def sum_integers(self, values: Sequence[int], name: str, members: Members) -> Pending:
        key = (name, len(values), members.process_set.process_set_id)
        if key not in self._sums:
            self._sums[key] = summing(self.hvd, name, members)
        return InThread(lambda: self._sums[key](tf.constant(values, tf.int64)).numpy().tolist())

    def broadcast(self, tensors: Sequence[Any], name: str, root_rank: int, members: Members) -> Pending:
        variables = [value_of(tensor) for tensor in tensors]
        return InThread(lambda: _broadcast(self.hvd, variables, name, root_rank, members))

    def copy(self, tensor: Any) -> tf.Tensor:
        return tf.identity(value_of(tensor))

    def restore(self, tensor: Any, copy: tf.Tensor) -> None:
        value_of(tensor).assign(copy)

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
        handles = [value_of(tensor).handle for tensor in tensors]

        def average() -> tf.Tensor:
            tf.py_function(lambda step, *_: run(int(step)) and None, [step, *handles], [])
            return step

        done = tf.cond(now, average, lambda: step)
        with tf.control_dependencies([done]):  # a round that failed is not counted
            counter.assign_add(1)

    def numpy(self, tensor: Any) -> NDArray[Any]:
        value = value_of(tensor).read_value()
        array: NDArray[Any] = (tf.cast(value, tf.float64) if value.dtype.is_floating else value).numpy()
        return np.array(array)

    def assign(self, tensor: Any, array: NDArray[Any]) -> None:
        variable = value_of(tensor)
        variable.assign(tf.cast(tf.reshape(tf.constant(array), variable.shape), variable.dtype))

    def carrier(self, array: NDArray[np.float64]) -> tf.Variable:
        return tf.Variable(array)

    def bytes_of(self, tensor: Any) -> bytes:
        data: bytes = np.asarray(value_of(tensor)).tobytes()
        return data


def _inter_op_threads() -> int:
    """How many operations TensorFlow can run at a time; it takes one thread per core unless told otherwise."""
    configured = tf.config.threading.get_inter_op_parallelism_threads()
    return configured or int(os.environ.get("TF_NUM_INTEROP_THREADS") or 0) or os.cpu_count() or 1


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
                name=graph_name(f"{name}.{number}of{len(starts)}"),
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


def _stable_name(number: int, variable: Any) -> str:
    """Without what depends on this process: the counters that Keras adds to names, the path before layer and weight."""
    path = "/".join(getattr(variable, "path", variable.name).split("/")[-2:])  # a loaded model's path is shorter
    return f"{number} {re.sub(r'_[0-9]+(?=/|$)', '', path)}"
