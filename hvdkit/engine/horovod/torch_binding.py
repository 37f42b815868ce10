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

from hvdkit.engine.horovod.binding import Binding, Call, Request
from hvdkit.transport.buffer import Buffer


class TorchBinding(Binding):
    """See Binding."""

    framework = "torch"
    reduced = frozenset({"float16", "float32", "float64", "int32", "int64"})

    def __init__(self) -> None:
        super().__init__(horovod, mpi_ops, elastic)

    def start(self, call: Call, arrays: Sequence[Any]) -> Request:
        """See Binding."""
        tensors = [array if isinstance(array, torch.Tensor) else _as_tensor(array) for array in arrays]
        inputs: list[Any] = tensors[:1]
        function = f"{call.kind}_async"
        if call.kind in ("allreduce", "broadcast"):
            function += "_"  # in place
        elif call.kind == "alltoall":
            inputs.append(torch.tensor(list(call.splits), dtype=torch.int32))
        if len(tensors) > 1:
            function, inputs = f"grouped_{function}", [tensors]
        options = self.arguments(replace(call, name=self.prefix + call.name))
        try:
            return _Handle(self, getattr(mpi_ops, function)(*inputs, **options))
        except (CoreError, NotImplementedError) as error:
            raise self.explain(error) from None

    def prepare(self, call: Call, like: Any) -> Callable[[Any], Request]:
        """See Binding. What Horovod's Python finds out about a tensor in each call is found out once."""
        if mpi_ops.rocm_built():  # divides in Python
            return super().prepare(call, like)
        begin = getattr(mpi_ops.mpi_lib, mpi_ops._check_function(mpi_ops._allreduce_function_factory, like))
        op, name = getattr(horovod, call.op.capitalize()), (self.prefix + call.name).encode()
        options = (1, name, op, call.prescale, call.postscale, call.process_set.process_set_id)
        tensors_in_use = mpi_ops._handle_map

        def start(tensor: torch.Tensor) -> Request:
            try:
                handle = begin(tensor, tensor, *options)
            except RuntimeError as error:
                raise self.explain(error) from None
            tensors_in_use[handle] = (tensor, tensor)
            return _Handle(self, handle)

        return start

    def view(self, array: Any, dtype: str) -> Any:
        """See Binding."""
        if not isinstance(array, torch.Tensor):
            return super().view(array, dtype)
        return array.as_strided(array.shape, (1,)).view(getattr(torch, dtype))  # the stride of one element may be 0

    def scale(self, buffer: Buffer, factor: float) -> None:
        """See Binding."""
        array: Any = buffer.array
        if isinstance(array, torch.Tensor) and factor != 1.0:
            host = array.cpu()
            super().scale(Buffer(host.numpy(), buffer.dtype), factor)
            array.copy_(host)
        else:
            super().scale(buffer, factor)


class _Handle:
    """See Request."""

    def __init__(self, binding: Binding, handle: int) -> None:
        self._binding, self._handle = binding, handle

    def done(self) -> bool:
        """See Request."""
        return bool(mpi_ops.poll(self._handle))

    def result(self) -> list[Any]:
        """See Request."""
        try:
            output = mpi_ops.synchronize(self._handle)
        except CoreError as error:
            raise self._binding.explain(error) from None
        return list(output) if isinstance(output, tuple | list) else [output]


def _as_tensor(array: Any) -> torch.Tensor:
    """An array of the host's memory as a tensor, sharing memory; a copy of one that may not be written to."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
