"""Horovod's core through its Python bindings, one for each framework."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hvdkit.engine.api import STORAGE, Buffer
from hvdkit.engine.named.integers import multiply
from hvdkit.errors import HorovodInternalError, MissingDependencyError

REDUCTIONS = frozenset({"allreduce", "reducescatter"})
#: Operations whose results are in the given arrays; the others return new arrays.
IN_PLACE = frozenset({"allreduce", "broadcast"})
#: Dtypes that Horovod can allreduce but not reducescatter.
_NOT_SCATTERED = frozenset({"int8", "uint8"})
#: Dtypes that Horovod's core sends in each framework; others are sent as integers of their width, or as pairs.
_MOVED = frozenset({"uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"})
_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "int64"}


@dataclass(frozen=True)
class Call:
    """The parameters of an operation for Horovod's core.

    kind: allreduce, allgather, broadcast, alltoall or reducescatter.
    name: its name, the same on all ranks.
    process_set: Horovod's object.
    op: of a reduction: average, sum, min, max, product or adasum.
    prescale, postscale: factors of a reduction.
    root: root rank of a broadcast, in the world.
    splits: rows for each rank in an alltoall.
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
    """An operation that was submitted to Horovod.

    done: returns whether result() would return at once; never waits. result: returns the results; blocks. Raises
    HorovodInternalError (hvdkit's) if the operation failed.
    """

    done: Callable[[], bool]
    result: Callable[[], list[Any]]


def check_device(device: str, *, built: bool) -> None:
    """Raise MissingDependencyError for memory of a GPU if Horovod is built without GPUs.

    device: device of the memory, for example "cuda:0". built: is Horovod built for GPUs? Horovod's own error only names
        a function that it lacks.
    """
    if device != "cpu" and not built:
        raise MissingDependencyError(
            f"A tensor is on {device}, and Horovod (the engine of this job) is built without GPUs. Build it again: "
            "hvdkit build-horovod --gpu-operations nccl --rebuild; or use hvdkit's own engine (HVDKIT_ENGINE=native)."
        )


class Binding(ABC):
    """Horovod's core through one framework; module, mpi_ops, elastic: Horovod's modules for it.

    framework: its name.
    reduced: the dtypes that allreduce accepts.
    most_names: see Engine.
    basics: Horovod's object of that name: ranks, built-in features, timeline.
    changes: its notification manager, which is notified of changes of the world.
    prefix: prefix of the names of all operations.
    """

    framework: str
    reduced: frozenset[str]
    most_names = 0

    def __init__(self, module: Any, mpi_ops: Any, elastic: Any) -> None:
        self.module, self._mpi_ops, self.basics, self.prefix = module, mpi_ops, mpi_ops._basics, ""
        self.changes: Any = elastic.notification_manager

    @abstractmethod
    def start(self, call: Call, arrays: Sequence[Any]) -> Request:
        """Begin an operation on contiguous arrays, in host memory or as the framework's tensors.

        call: its parameters.
        arrays: one array, or several of an allreduce, which are reduced as one.
        If the kind is not IN_PLACE, the results are those of Request.result(); for an alltoall they end with the rows
        from each rank.
        Raises HorovodInternalError if Horovod refuses the operation.
        """

    def invoke(self, function: str, call: Call, tensors: Sequence[Any], splits: Sequence[Any], **options: Any) -> Any:
        """Call Horovod's function of this name on tensors of the framework.

        function: its name, with {} for the prefix of the kind if several tensors are reduced as one.
        call: the parameters.
        tensors: the tensors.
        splits: of an alltoall, one tensor.
        options: arguments of this framework's functions only.
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
        """Raise TypeError for an allreduce or a reducescatter of a dtype that Horovod's core cannot reduce."""
        known = self.reduced if kind == "allreduce" else self.reduced - _NOT_SCATTERED
        if dtype not in known:
            raise TypeError(
                f"{kind}: Horovod's core (the engine of this job) cannot reduce {dtype}, only "
                f"{', '.join(sorted(known))}. Cast the tensor, or use the native engine (HVDKIT_ENGINE=native)."
            )

    def numbers_of(self, buffer: Buffer, shape: Sequence[int], kind: str) -> Any:
        """Return the buffer's memory in that shape, for an operation of this kind, in a dtype that Horovod knows.

        If the operation only moves data, an unknown dtype becomes integers of its width; complex128 becomes pairs,
        (*shape, 2). Raises as check_reduced() does.
        """
        if kind in REDUCTIONS:
            self.check_reduced(kind, buffer.dtype)
        pairs = (2,) if buffer.dtype == "complex128" else ()
        known = _INTEGERS[STORAGE[buffer.dtype].itemsize]
        array = buffer.array if buffer.dtype in _MOVED else self.view(buffer.array, known)
        return array.reshape((*shape, *pairs))

    def buffer_of(self, array: Any, like: Buffer) -> Buffer:
        """Convert Horovod's result for numbers_of(like) to a buffer of the same kind and dtype, sharing memory."""
        flat = np.asarray(array).reshape(-1) if isinstance(like.array, np.ndarray) else array.reshape(-1)
        return type(like)(self.view(flat, like.dtype) if like.dtype not in _MOVED else flat, like.dtype)

    def view(self, array: Any, dtype: str) -> Any:
        """View an array (n,) as another dtype, sharing memory; a dtype of half the width gives (2n,)."""
        return array.view(STORAGE[dtype])

    def scale(self, buffer: Buffer, factor: float) -> None:
        """Multiply integers in place; fractions of the results are dropped."""
        multiply(buffer, factor)

    def explain(self, error: Exception) -> HorovodInternalError:
        """Convert Horovod's error to hvdkit's."""
        return HorovodInternalError(f"Horovod: {error}")

    def join(self) -> Request:
        """Begin to join the others' allreduces with zeros; the result is the rank that joined last."""
        last: Future[list[Any]] = Future()

        def take_part() -> None:
            try:
                last.set_result([int(self.module.join())])
            except Exception as error:  # re-raised in the thread that waits
                last.set_exception(self.explain(error))

        threading.Thread(target=take_part, name="hvdkit-join", daemon=True).start()
        return Request(last.done, last.result)
