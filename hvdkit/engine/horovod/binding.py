"""Horovod's core as its Python bindings, one a framework, offer it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hvdkit.engine.named.integers import multiply
from hvdkit.errors import HorovodInternalError
from hvdkit.transport.buffer import STORAGE, Buffer

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


class Request(Protocol):
    """An operation that Horovod has taken; a concurrent.futures.Future is one."""

    def done(self) -> bool:
        """Would result() return at once? Never waits."""

    def result(self) -> list[Any]:
        """The results; blocks. Raises HorovodInternalError (hvdkit's) if the operation failed."""


class Binding(ABC):
    """Horovod's core by way of one framework; module, mpi_ops, elastic: the modules of Horovod's for it.

    framework: its name. reduced: the dtypes that allreduce takes. basics: Horovod's object of that name: ranks, what
    was built, timeline. changes: its notification manager, which hears of changes of the world. prefix: of the names of
    all operations.
    """

    framework: str
    reduced: frozenset[str]

    def __init__(self, module: Any, mpi_ops: Any, elastic: Any) -> None:
        self.module, self.basics, self.prefix = module, mpi_ops._basics, ""
        self.changes: Any = elastic.notification_manager

    @abstractmethod
    def start(self, call: Call, arrays: Sequence[Any]) -> Request:
        """Begin an operation on contiguous arrays, of the host's memory or the framework's tensors.

        One array, or several of an allreduce, which is done as one. What allreduce and broadcast give is in the arrays
        themselves; of the others Request.result() gives new ones, and of an alltoall also the rows from each rank.
        Raises HorovodInternalError if Horovod refuses it.
        """

    def prepare(self, call: Call, like: Any) -> Callable[[Any], Request]:
        """A function that begins this allreduce (sum or average) of a tensor like this one, in place, in many calls."""
        return lambda array: self.start(call, [array])

    def arguments(self, call: Call) -> dict[str, Any]:
        """What Horovod's functions for an operation are given besides arrays, in every framework."""
        arguments = {"name": call.name, "process_set": call.process_set}
        if call.kind == "broadcast":
            arguments["root_rank"] = call.root
        elif call.kind in ("allreduce", "reducescatter"):
            op = getattr(self.module, call.op.capitalize())
            arguments.update(op=op, prescale_factor=call.prescale, postscale_factor=call.postscale)
        return arguments

    def check_reduced(self, kind: str, dtype: str) -> None:
        """Raise TypeError for an allreduce or a reducescatter of a dtype that Horovod's core does not add."""
        known = self.reduced if kind == "allreduce" else self.reduced - _NOT_SCATTERED
        if dtype not in known:
            raise TypeError(
                f"{kind} of {dtype}: Horovod's core, which is the engine here, reduces {', '.join(sorted(known))} "
                f"only. Cast the tensor, or take hvdkit's own engine (HVDKIT_ENGINE=native)."
            )

    def numbers_of(self, buffer: Buffer, shape: Sequence[int]) -> Any:
        """The buffer's memory in that shape, as a dtype that Horovod knows: bits are moved as integers of that width.

        Of complex128 as pairs: (*shape, 2).
        """
        pairs = (2,) if buffer.dtype == "complex128" else ()
        array = buffer.array
        if buffer.dtype not in _MOVED:
            array = self.view(array, _INTEGERS[STORAGE[buffer.dtype].itemsize])
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
        return last
