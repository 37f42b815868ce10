"""Horovod's core by way of horovod.torch, for torch's tensors and for arrays in the host's memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import horovod.torch as horovod
import torch
from horovod.common import elastic
from horovod.common.exceptions import HorovodInternalError as CoreError
from horovod.torch import mpi_ops

from hvdkit.engine.horovod.binding import Move, Pending
from hvdkit.errors import HorovodInternalError
from hvdkit.transport.buffer import FLOAT8

_OPS = {
    "average": horovod.Average,
    "sum": horovod.Sum,
    "min": horovod.Min,
    "max": horovod.Max,
    "product": horovod.Product,
    "adasum": horovod.Adasum,
}


class TorchBinding:
    """See Binding."""

    framework = "torch"
    #: What allreduce and reducescatter take.
    reduced = frozenset({"float16", "float32", "float64", "int32", "int64"})

    prefix = ""

    def __init__(self) -> None:
        self.basics = mpi_ops._basics

    def init(self, sets: Sequence[Any] | str, comm: Any = None) -> None:
        """See Binding."""
        horovod.init(comm=comm, process_sets=sets)

    def shutdown(self) -> None:
        """See Binding."""
        horovod.shutdown()

    def start(self, move: Move, arrays: Sequence[Any]) -> Pending:
        """See Binding."""
        tensors = [_see(one) for one in arrays]
        move = replace(move, name=self.prefix + move.name) if self.prefix else move
        try:
            handle = _STARTING[move.kind](move, tensors)
        except (CoreError, NotImplementedError) as error:
            raise HorovodInternalError(f"Horovod: {error}") from None
        if move.kind in ("allreduce", "broadcast"):
            return _Handle(handle, arrays)
        return _Handle(handle, None, arrays[0])

    def prepare(self, move: Move, like: Any) -> Callable[[Any], Pending]:
        """See Binding. What Horovod's Python finds out about a tensor in each call is found out once."""
        if mpi_ops.rocm_built():  # divides in Python
            return lambda tensor: self.start(move, [tensor])
        begin = getattr(mpi_ops.mpi_lib, mpi_ops._check_function(mpi_ops._allreduce_function_factory, like))
        options = (
            1,
            (self.prefix + move.name).encode(),
            _OPS[move.op],
            move.prescale,
            move.postscale,
            move.process_set.process_set_id,
        )
        kept = mpi_ops._handle_map

        def start(tensor: torch.Tensor) -> Pending:
            try:
                handle = begin(tensor, tensor, *options)
            except RuntimeError as error:
                raise HorovodInternalError(f"Horovod: {error}") from None
            kept[handle] = (tensor, tensor)
            return _Handle(handle, (tensor,))

        return start

    def scale(self, array: Any, factor: float) -> None:
        """See Binding."""
        divisor = round(1 / factor) if factor else 0
        if divisor and 1 / divisor == factor:
            array.div_(divisor, rounding_mode="trunc")
        else:
            array.copy_(array * factor)

    def changes(self) -> Any:
        """See Binding."""
        return elastic.notification_manager

    def join(self) -> Callable[[], int | None]:
        """See Binding."""
        found: list[Any] = []

        def take_part() -> None:
            try:
                found.append(int(horovod.join()))
            except Exception as error:  # of this thread, for whoever asks for the answer
                found.append(HorovodInternalError(f"Horovod: {error}"))

        threading.Thread(target=take_part, name="hvdkit-join", daemon=True).start()

        def answer() -> int | None:
            if found and isinstance(found[0], Exception):
                raise found[0]
            return found[0] if found else None

        return answer


class _Handle:
    """See Pending. results: where they are, if they are there already. like: what new results are like."""

    def __init__(self, handle: int, results: Sequence[Any] | None, like: Any = None) -> None:
        self._handle, self._results, self._like = handle, results, like

    def done(self) -> bool:
        """See Pending."""
        return bool(mpi_ops.poll(self._handle))

    def wait(self) -> list[Any]:
        """See Pending."""
        try:
            made = mpi_ops.synchronize(self._handle)
        except CoreError as error:
            raise HorovodInternalError(f"Horovod: {error}") from None
        if self._results is not None:
            return list(self._results)
        first, *rest = made if isinstance(made, tuple) else (made,)
        if isinstance(self._like, torch.Tensor):
            return [torch.view_as_complex(first) if self._like.is_complex() else first.view(self._like.dtype), *rest]
        return [first.numpy(), *rest]


#: Moved as integers of that width, which Horovod knows.
_AS_INTEGERS = {
    torch.bool: torch.uint8,
    torch.bfloat16: torch.int16,
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    **{getattr(torch, name): torch.uint8 for name in FLOAT8 if hasattr(torch, name)},
}


def _see(array: Any) -> torch.Tensor:
    """An array of the host's memory as a tensor, sharing memory; a copy of one that may not be written to."""
    if isinstance(array, torch.Tensor):
        if array.is_complex():
            return torch.view_as_real(array)
        return array.view(_AS_INTEGERS[array.dtype]) if array.dtype in _AS_INTEGERS else array
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _allreduce(move: Move, tensors: list[torch.Tensor]) -> int:
    options = (move.name, _OPS[move.op], move.prescale, move.postscale, move.process_set)
    if len(tensors) == 1:
        return int(mpi_ops._allreduce_async(tensors[0], tensors[0], *options))
    return int(mpi_ops._grouped_allreduce_async(tensors, tensors, *options))


def _broadcast(move: Move, tensors: list[torch.Tensor]) -> int:
    return int(horovod.broadcast_async_(tensors[0], move.root, name=move.name, process_set=move.process_set))


def _allgather(move: Move, tensors: list[torch.Tensor]) -> int:
    return int(horovod.allgather_async(tensors[0], name=move.name, process_set=move.process_set))


def _alltoall(move: Move, tensors: list[torch.Tensor]) -> int:
    splits = torch.tensor(list(move.splits), dtype=torch.int32)
    return int(horovod.alltoall_async(tensors[0], splits, name=move.name, process_set=move.process_set))


def _reducescatter(move: Move, tensors: list[torch.Tensor]) -> int:
    return int(
        horovod.reducescatter_async(
            tensors[0],
            name=move.name,
            op=_OPS[move.op],
            process_set=move.process_set,
            prescale_factor=move.prescale,
            postscale_factor=move.postscale,
        )
    )


_STARTING: dict[str, Callable[[Move, list[torch.Tensor]], int]] = {
    "allreduce": _allreduce,
    "broadcast": _broadcast,
    "allgather": _allgather,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
}
