"""Horovod's core as its Python bindings, one a framework, offer it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hvdkit.engine.api import Buffer
from hvdkit.engine.named.integers import multiply
from hvdkit.errors import HorovodInternalError, MissingDependencyError
from hvdkit.transport.buffer import STORAGE

REDUCTIONS = frozenset({"allreduce", "reducescatter"})
#: Operations whose results are in the arrays that they are given; of the others they are new ones.
IN_PLACE = frozenset({"allreduce", "broadcast"})
#: What Horovod reduces, but has no reducescatter of.
_NOT_SCATTERED = frozenset({"int8", "uint8"})
#: What Horovod's core moves in each framework; the bits of others as integers of that width, or as pairs.
_MOVED = frozenset({"uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"})
_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "int64"}


@dataclass(frozen=True)
class Call:
    """One operation as Horovod's core is asked for it.

    kind: allreduce, allgather, broadcast, alltoall or reducescatter. name: the same on all ranks. process_set:
    Horovod's object. op: of a reduction, average, sum, min, max, product or adasum. prescale, postscale: its factors.
    root: of a broadcast, in the world. splits: of an alltoall, rows for each rank.
    """

    kind: str
    name: str
    process_set: Any
    op: str = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: Sequence[int] = ()


class Request(NamedTuple):
    """An operation that Horovod has taken.

    done: would result() return at once? Never waits. result: gives the results; blocks. Raises HorovodInternalError
    (hvdkit's) if the operation failed.
    """

    done: Callable[[], bool]
    result: Callable[[], list[Any]]


def check_device(device: str, *, built: bool) -> None:
    """Raise MissingDependencyError for memory of a GPU where Horovod is built without GPUs.

    device: of the memory, as "cuda:0". built: for GPUs? Horovod's own error names a function that it lacks.
    """
    if device != "cpu" and not built:
        raise MissingDependencyError(
            f"A tensor is on {device}, and Horovod (the engine of this job) is built without GPUs. Build it again: "
            "hvdkit build-horovod --gpu-operations nccl --rebuild; or use hvdkit's own engine (HVDKIT_ENGINE=native)."
        )


class Binding(ABC):
    """Horovod's core by way of one framework; module, mpi_ops, elastic: the modules of Horovod's for it.

    framework: its name. reduced: the dtypes that allreduce takes. most_names: see Engine. basics: Horovod's object of
    that name: ranks, what was built, timeline. changes: its notification manager, which hears of changes of the world.
    prefix: of the names of all operations.
    """

    framework: str
    reduced: frozenset[str]
    most_names = 0

    def __init__(self, module: Any, mpi_ops: Any, elastic: Any) -> None:
        self.module, self._mpi_ops, self.basics, self.prefix = module, mpi_ops, mpi_ops._basics, ""
        self.changes: Any = elastic.notification_manager

    @abstractmethod
    def start(self, call: Call, arrays: Sequence[Any]) -> Request:
        """Begin an operation on contiguous arrays, of the host's memory or the framework's tensors.

        One array, or several of an allreduce, which is done as one. Results that are not IN_PLACE are those of
        Request.result(), of an alltoall also the rows from each rank.
        Raises HorovodInternalError if Horovod refuses it.
        """

    def invoke(self, function: str, call: Call, tensors: Sequence[Any], splits: Sequence[Any], **options: Any) -> Any:
        """Call Horovod's function of this name on tensors of the framework.

        function: with {} for what comes before the kind where several tensors are reduced as one. splits: of an
        alltoall, one tensor. options: what only this framework's functions take.
        """
        options.update(name=call.name, process_set=call.process_set)
        if call.kind == "broadcast":
            options["root_rank"] = call.root
        elif call.kind in REDUCTIONS:
            op = getattr(self.module, call.op.capitalize())
            options.update(op=op, prescale_factor=call.prescale, postscale_factor=call.postscale)
        several = len(tensors) > 1
        inputs = [tensors] if several else tensors
        return getattr(self._mpi_ops, function.format("grouped_" * several))(*inputs, *splits, **options)

    def check_reduced(self, kind: str, dtype: str) -> None:
        """Raise TypeError for an allreduce or a reducescatter of a dtype that Horovod's core does not add."""
        known = self.reduced if kind == "allreduce" else self.reduced - _NOT_SCATTERED
        if dtype not in known:
            raise TypeError(
                f"{kind}: Horovod's core (the engine of this job) cannot reduce {dtype}, only "
                f"{', '.join(sorted(known))}. Cast the tensor, or use the native engine (HVDKIT_ENGINE=native)."
            )

    def numbers_of(self, buffer: Buffer, shape: Sequence[int], kind: str) -> Any:
        """The buffer's memory in that shape, for an operation of this kind, as a dtype that Horovod knows.

        Bits that are only moved as integers of that width, of complex128 as pairs: (*shape, 2). Raises as
        check_reduced() does.
        """
        if kind in REDUCTIONS:
            self.check_reduced(kind, buffer.dtype)
        pairs = (2,) if buffer.dtype == "complex128" else ()
        known = _INTEGERS[STORAGE[buffer.dtype].itemsize]
        array = buffer.array if buffer.dtype in _MOVED else self.view(buffer.array, known)
        return array.reshape((*shape, *pairs))

    def buffer_of(self, array: Any, like: Buffer) -> Buffer:
        """What Horovod gave for numbers_of(like), as a buffer of the same kind and dtype, sharing memory."""
        flat = np.asarray(array).reshape(-1) if isinstance(like.array, np.ndarray) else array.reshape(-1)
        return type(like)(self.view(flat, like.dtype) if like.dtype not in _MOVED else flat, like.dtype)

    def view(self, array: Any, dtype: str) -> Any:
        """An array (n,) as one of another dtype, sharing memory; of half as wide a one (2n,)."""
        return array.view(STORAGE[dtype])

    def scale(self, buffer: Buffer, factor: float) -> None:
        """Multiply integers in place; what is not whole loses its fraction."""
        multiply(buffer, factor)

    def explain(self, error: Exception) -> HorovodInternalError:
        """Horovod's error as hvdkit's."""
        return HorovodInternalError(f"Horovod: {error}")

    def join(self) -> Request:
        """Begin to take part in the others' allreduces with zeros; gives the rank that was the last to join."""
        last: Future[list[Any]] = Future()

        def take_part() -> None:
            try:
                last.set_result([int(self.module.join())])
            except Exception as error:  # of this thread, for whoever waits
                last.set_exception(self.explain(error))

        threading.Thread(target=take_part, name="hvdkit-join", daemon=True).start()
        return Request(last.done, last.result)
