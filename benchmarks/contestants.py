"""What takes part in ``benchmarks/round.py``: ways to make tensors the same on all ranks, ours and those of others.

A contestant is made when it is chosen, so that those which are not take no memory. Each works on tensors of its own.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import socket
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from shapes import Shape, elements

from hvd_averaging import PeriodicModelAverager

Call = Callable[[], object]
Calls = tuple[Call, ...]
"""What is timed in one turn. Between several calls others would train: that pause is not timed."""

Makers = dict[str, Callable[[], Calls]]

PACKED, FLAT, DELAYED = "ours, packed", "ours, flat", "ours, delayed"
WIRES = {f"ours, {wire}": wire for wire in ("fp16", "bf16", "int8")}
ONE_BUCKET = "ours, packed in one"  # so that nothing is written before all is reduced
ONE_TENSOR = "ours, flat, one tensor"
MPI = "MPI_Allreduce in place"
GROUPED, HOROVOD_FLAT = "hvd.grouped_allreduce_", "hvd.allreduce_, one tensor"
TORCH_AVERAGER = "torch's PeriodicModelAverager"
TORCH_FLAT, TORCH_EACH = "torch all_reduce, one tensor", "torch all_reduce, each"
TENSORFLOW, BY_HAND = "ours, TensorFlow", "grouped and assign by hand"


def averager(name: str, **options: Any) -> PeriodicModelAverager:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # period=1: here every call is to be a round
        return PeriodicModelAverager(**{"period": 1, **options}, name=name)


def threads_per_rank(hvd: Any) -> int:
    """Ranks that fight for cores would measure that. Who launches two hosts on one machine says how many there are."""
    told = os.environ.get("OMP_NUM_THREADS")
    return int(told) if told else max(1, (os.cpu_count() or 1) // int(hvd.local_size()))


class OfTorch:
    """The contestants that average PyTorch tensors of these shapes. ``label`` tells several sets of shapes apart."""

    def __init__(self, hvd: Any, shapes: Sequence[Shape], label: str) -> None:
        self.torch = importlib.import_module("torch")
        self.torch.set_num_threads(threads_per_rank(hvd))
        self.hvd, self.shapes, self.label = hvd, shapes, label

    def makers(self) -> Makers:
        found: Makers = {PACKED: lambda: self.ours(PACKED), FLAT: self.flat, ONE_TENSOR: self.one_tensor}
        found[ONE_BUCKET] = lambda: self.ours(ONE_BUCKET, bucket_bytes=2**40)
        found[DELAYED] = lambda: 2 * self.ours(DELAYED, period=2, delay=1)  # the first sets off, the second arrives
        for name, wire in WIRES.items():
            found[name] = functools.partial(self.ours, name, wire=wire)
        if self.hvd.mpi_enabled() and importlib.util.find_spec("mpi4py"):
            found[MPI] = self.mpi
        found |= {GROUPED: self.grouped, HOROVOD_FLAT: self.horovod_flat}
        return found | {TORCH_AVERAGER: self.torch_averager, TORCH_FLAT: self.torch_flat, TORCH_EACH: self.torch_each}

    def parameters(self, shapes: Sequence[Shape]) -> list[Any]:
        return [self.torch.nn.Parameter(self.torch.randn(shape)) for shape in shapes]

    def numbers(self) -> Any:
        return self.torch.randn(elements(self.shapes))

    def ours(self, name: str, **options: Any) -> Calls:
        parameters, every_step = self.parameters(self.shapes), averager(f"{name}, {self.label}", **options)
        return (lambda: every_step.average_parameters(parameters),)

    def flat(self, name: str = FLAT, shapes: Sequence[Shape] | None = None) -> Calls:
        flatten = importlib.import_module("hvd_averaging.torch").flatten_parameters
        parameters, every_step = self.parameters(shapes or self.shapes), averager(f"{name}, {self.label}")
        flatten(parameters)
        return (lambda: every_step.average_parameters(parameters),)

    def one_tensor(self) -> Calls:
        return self.flat(ONE_TENSOR, [(elements(self.shapes),)])

    def mpi(self) -> Calls:
        """What moving and adding the bytes costs without Horovod, if mpi4py is there (``pip install mpi4py``)."""
        mpi, numbers = importlib.import_module("mpi4py.MPI"), self.numbers().numpy()
        return (lambda: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, numbers),)

    def grouped(self) -> Calls:
        tensors, name = [self.torch.randn(shape) for shape in self.shapes], f"grouped, {self.label}"
        return (lambda: self.hvd.grouped_allreduce_(tensors, name=name, op=self.hvd.Average),)

    def horovod_flat(self) -> Calls:
        numbers, name = self.numbers(), f"flat, {self.label}"
        return (lambda: self.hvd.allreduce_(numbers, name=name, op=self.hvd.Average),)

    def torch_averager(self) -> Calls:
        distributed = torch_distributed(self.hvd)
        module = importlib.import_module("torch.distributed.algorithms.model_averaging.averagers")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            every_step = module.PeriodicModelAverager(period=1, process_group=distributed.group.WORLD)
        parameters = self.parameters(self.shapes)
        for parameter in parameters:  # it leaves those without a gradient out
            parameter.grad = self.torch.zeros(1).expand_as(parameter)
        return (lambda: every_step.average_parameters(parameters),)

    def torch_flat(self) -> Calls:
        distributed, numbers = torch_distributed(self.hvd), self.numbers()

        def call() -> None:
            distributed.all_reduce(numbers)
            numbers.div_(distributed.get_world_size())

        return (call,)

    def torch_each(self) -> Calls:
        """One collective for each parameter, as accelerate's LocalSGD averages: a copy, its sum, and ``.data`` anew."""
        distributed, parameters = torch_distributed(self.hvd), self.parameters(self.shapes)

        def call() -> None:
            for parameter in parameters:
                mean = parameter.data.clone()
                distributed.all_reduce(mean)
                parameter.data = mean.div_(distributed.get_world_size())

        return (call,)


def torch_distributed(hvd: Any) -> Any:
    """``torch.distributed`` over Gloo, in the same processes beside Horovod, with rank 0 as the place to meet."""
    distributed = importlib.import_module("torch.distributed")
    if not distributed.is_initialized():
        alone = hvd.local_size() == hvd.size()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", os.environ.get("HOROVOD_GLOO_IFACE") or ("lo" if alone else ""))
        leads, place = hvd.rank() == 0, None
        store = None
        if leads:
            place = "127.0.0.1" if alone else socket.gethostbyname(socket.gethostname())
            store = distributed.TCPStore(place, 0, is_master=True, wait_for_workers=False)
        place, port = hvd.broadcast_object((place, store.port if store else None), name="torch store")
        store = store or distributed.TCPStore(place, port, is_master=False)
        distributed.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
    return distributed


class OfTensorflow:
    """The contestants that average TensorFlow variables of these shapes."""

    def __init__(self, hvd: Any, shapes: Sequence[Shape], label: str) -> None:
        self.tf = importlib.import_module("tensorflow")
        self.tf.config.threading.set_intra_op_parallelism_threads(threads_per_rank(hvd))
        self.hvd, self.shapes, self.label = hvd, shapes, label

    def makers(self) -> Makers:
        return {TENSORFLOW: self.ours, BY_HAND: self.by_hand}

    def variables(self) -> list[Any]:
        return [self.tf.Variable(self.tf.random.normal(shape)) for shape in self.shapes]

    def ours(self) -> Calls:
        variables, every_step = self.variables(), averager(f"{TENSORFLOW}, {self.label}")
        return (lambda: every_step.average_parameters(variables),)

    def by_hand(self) -> Calls:
        """In one ``tf.function``, as one would write it without us."""
        variables, name = self.variables(), "by_hand_" + "".join(filter(str.isalnum, self.label))

        def call() -> None:
            numbers = [variable.read_value() for variable in variables]
            for variable, mean in zip(variables, self.hvd.grouped_allreduce(numbers, name=name), strict=True):
                variable.assign(mean)

        return (self.tf.function(call, autograph=False),)


FRAMEWORKS: dict[str, type[OfTorch] | type[OfTensorflow]] = {"torch": OfTorch, "tensorflow": OfTensorflow}
