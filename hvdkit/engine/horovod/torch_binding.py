"""Horovod's core by way of horovod.torch, for torch's tensors and for arrays in the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import horovod.torch as horovod
import torch
from horovod.common import elastic
from horovod.common.exceptions import HorovodInternalError as CoreError
from horovod.torch import mpi_ops

from hvdkit.engine.horovod.binding import Binding, Move, Pending
from hvdkit.errors import HorovodInternalError
from hvdkit.transport.buffer import FLOAT8


class TorchBinding(Binding):
    """See Binding."""

    framework = "torch"
    #: What allreduce and reducescatter take.
    reduced = frozenset({"float16", "float32", "float64", "int32", "int64"})

    def __init__(self) -> None:
        super().__init__(horovod, mpi_ops, elastic)

    def start(self, move: Move, arrays: Sequence[Any]) -> Pending:
        """See Binding."""
        try:
            handle = self._begin(replace(move, name=self.prefix + move.name), [_as_tensor(array) for array in arrays])
        except (CoreError, NotImplementedError) as error:
            raise self.explain(error) from None
        if move.kind in ("allreduce", "broadcast"):
            return _Handle(handle, arrays)
        return _Handle(handle, None, arrays[0])

    def _begin(self, move: Move, tensors: list[torch.Tensor]) -> int:
        tensor, op, group = tensors[0], self._ops[move.op], {"name": move.name, "process_set": move.process_set}
        factors = {"prescale_factor": move.prescale, "postscale_factor": move.postscale}
        if move.kind == "broadcast":
            return int(horovod.broadcast_async_(tensor, move.root, **group))
        if move.kind == "allgather":
            return int(horovod.allgather_async(tensor, **group))
        if move.kind == "alltoall":
            return int(horovod.alltoall_async(tensor, torch.tensor(list(move.splits), dtype=torch.int32), **group))
        if move.kind == "reducescatter":
            return int(horovod.reducescatter_async(tensor, op=op, **group, **factors))
        if len(tensors) == 1:
            return int(mpi_ops._allreduce_async(tensor, tensor, op=op, **group, **factors))
        return int(mpi_ops._grouped_allreduce_async(tensors, tensors, op=op, **group, **factors))

    def prepare(self, move: Move, like: Any) -> Callable[[Any], Pending]:
        """See Binding. What Horovod's Python finds out about a tensor in each call is found out once."""
        if mpi_ops.rocm_built():  # divides in Python
            return super().prepare(move, like)
        begin = getattr(mpi_ops.mpi_lib, mpi_ops._check_function(mpi_ops._allreduce_function_factory, like))
        name = (self.prefix + move.name).encode()
        options = (1, name, self._ops[move.op], move.prescale, move.postscale, move.process_set.process_set_id)
        tensors_in_use = mpi_ops._handle_map

        def start(tensor: torch.Tensor) -> Pending:
            try:
                handle = begin(tensor, tensor, *options)
            except RuntimeError as error:
                raise self.explain(error) from None
            tensors_in_use[handle] = (tensor, tensor)
            return _Handle(handle, (tensor,))

        return start

    def scale(self, array: Any, factor: float) -> None:
        """See Binding."""
        divisor = round(1 / factor) if factor else 0
        if divisor and 1 / divisor == factor:
            array.div_(divisor, rounding_mode="trunc")
        else:
            array.copy_(array * factor)

    def explain(self, error: Exception) -> HorovodInternalError:
        """See Binding."""
        return HorovodInternalError(f"Horovod: {error}")


class _Handle:
    """See Pending. results: the tensors that hold them, if they are there already. like: what new results are like."""

    def __init__(self, handle: int, results: Sequence[Any] | None, like: Any = None) -> None:
        self._handle, self._results, self._like = handle, results, like

    def done(self) -> bool:
        """See Pending."""
        return bool(mpi_ops.poll(self._handle))

    def wait(self) -> list[Any]:
        """See Pending."""
        try:
            output = mpi_ops.synchronize(self._handle)
        except CoreError as error:
            raise HorovodInternalError(f"Horovod: {error}") from None
        if self._results is not None:
            return list(self._results)
        first, *rest = output if isinstance(output, tuple) else (output,)
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


def _as_tensor(array: Any) -> torch.Tensor:
    """An array of the host's memory as a tensor, sharing memory; a copy of one that may not be written to."""
    if isinstance(array, torch.Tensor):
        if array.is_complex():
            return torch.view_as_real(array)
        return array.view(_AS_INTEGERS[array.dtype]) if array.dtype in _AS_INTEGERS else array
    return torch.from_numpy(array if array.flags.writeable else array.copy())
