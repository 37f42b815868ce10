"""Horovod's core through horovod.torch, for torch's tensors and for arrays in host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import horovod.torch as horovod
import torch
from horovod.common import elastic
from horovod.common.exceptions import HorovodInternalError as CoreError
from horovod.torch import mpi_ops

from hvdkit.engine.api import Buffer
from hvdkit_horovod.binding import IN_PLACE, Binding, Call, Request, check_device


class TorchBinding(Binding):
    """See Binding."""

    framework = "torch"
    reduced = frozenset({"float16", "float32", "float64", "int32", "int64"})

    def __init__(self) -> None:
        super().__init__(horovod, mpi_ops, elastic)
        self._on_gpus = bool(mpi_ops.cuda_built() or mpi_ops.rocm_built())

    def start(self, call: Call, arrays: Sequence[Any]) -> Request:
        tensors = [array if isinstance(array, torch.Tensor) else _as_tensor(array) for array in arrays]
        for tensor in tensors:
            check_device(str(tensor.device), built=self._on_gpus)
        splits = [torch.tensor(call.splits, dtype=torch.int32)] if call.kind == "alltoall" else []
        function = f"{{}}{call.kind}_async{'_' * (call.kind in IN_PLACE)}"
        try:
            return self._request(self.invoke(function, replace(call, name=self.prefix + call.name), tensors, splits))
        except (CoreError, NotImplementedError) as error:
            raise self.explain(error) from None

    def _request(self, handle: int) -> Request:
        def result() -> list[Any]:
            try:
                output = mpi_ops.synchronize(handle)
            except CoreError as error:
                raise self.explain(error) from None
            return list(output) if isinstance(output, tuple | list) else [output]

        return Request(functools.partial(mpi_ops.poll, handle), result)

    def prepare(self, call: Call, like: Any) -> Callable[[Any], Request]:
        """Make a function that begins this allreduce (sum or average), in place, of tensors like this one.

        The function can be called many times. It skips the checks of a tensor that Horovod's Python makes in each call:
        they are made here, once.
        """
        check_device(str(like.device), built=self._on_gpus)
        if mpi_ops.rocm_built():  # then Horovod divides in Python
            return lambda tensor: self.start(call, [tensor])
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
            return self._request(handle)

        return start

    def view(self, array: Any, dtype: str) -> Any:
        if not isinstance(array, torch.Tensor):
            return super().view(array, dtype)
        return array.as_strided(array.shape, (1,)).view(getattr(torch, dtype))  # the stride of 1 element may be 0

    def scale(self, buffer: Buffer, factor: float) -> None:
        array: Any = buffer.array
        if isinstance(array, torch.Tensor) and factor != 1.0:
            host = array.cpu()
            super().scale(Buffer(host.numpy(), buffer.dtype), factor)
            array.copy_(host)
        else:
            super().scale(buffer, factor)


def _as_tensor(array: Any) -> torch.Tensor:
    """Convert an array in host memory to a tensor, sharing memory; a read-only array is copied."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
