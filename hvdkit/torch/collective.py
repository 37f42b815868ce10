"""A collective on tensors as data, and the ways to run it: begun, done, and done with a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from hvdkit.engine.groups import Group
from hvdkit.engine.named.operation import Announcement, Operation
from hvdkit.torch import device_operations, gpu
from hvdkit.torch.handles import Handle, make_handle
from hvdkit.torch.tensors import TensorBuffer, as_buffer, contiguous, dtype_name
from hvdkit.transport.buffer import Buffer

Tensors = Sequence[torch.Tensor]
#: Operation.rows.
Rows = Sequence[tuple[int, ...]]
Result_co = TypeVar("Result_co", covariant=True)


class Collective(Generic[Result_co]):
    """One rank's part of a collective that has not begun.

    announcement: what the ranks must agree on. name: None for one that is counted. tensors: the caller's.
    pack: makes of the sequence of results what the caller gets. gradient: from Operation.rows and the gradients of the
    results to those of the tensors. collect: the results of an operation that has them in new memory; without it the
    operation overwrites the memory that it is given. overwrites: does it, even so?
    """

    __slots__ = ("announcement", "collect", "gradient", "group", "name", "overwrites", "pack", "tensors")

    def __init__(
        self,
        group: Group,
        announcement: Announcement,
        name: str | None,
        tensors: Tensors,
        pack: Callable[[Any], Result_co],
        gradient: Callable[[Rows, Tensors], Tensors],
        collect: Callable[[Operation], Tensors] | None = None,
        *,
        overwrites: bool = True,
    ) -> None:
        self.group, self.announcement, self.name, self.tensors = group, announcement, name, tensors
        self.pack, self.gradient, self.collect, self.overwrites = pack, gradient, collect, overwrites

    def begin(self, *, in_place: bool) -> Handle:
        """Begin it; synchronize() returns the results, which are written to the tensors if it is in place."""
        engine = self.group.engine
        memory, operation = self._start(engine.submit, in_place)
        return make_handle(engine, operation, lambda operation: self.pack(self._finish(operation, memory, in_place)))

    def do(self, *, in_place: bool) -> Result_co:
        """Do it; returns the results, which are written to the tensors if it is in place."""
        memory, operation = self._start(self.group.engine.do, in_place)
        return self.pack(self._finish(operation, memory, in_place))

    def do_differentiably(self) -> Result_co:
        """Do it; returns the results, with a gradient where one of the tensors needs it."""
        for tensor in self.tensors:
            if tensor.requires_grad and torch.is_grad_enabled():
                return self.pack(_Differentiable.apply(self, *self.tensors))  # type: ignore[no-untyped-call]
        return self.do(in_place=False)

    def _start(
        self, start: Callable[[str, Announcement, list[Buffer]], Operation], in_place: bool
    ) -> tuple[Tensors, Operation]:
        """Start the operation; returns the memory that it has been given, a tensor for each, and the operation."""
        engine, kind, copied = self.group.engine, self.announcement.kind, self.overwrites and not in_place
        name = f"{kind}.{self.name}" if self.name else engine.make_name(kind)
        if not engine.takes_tensors and not gpu.is_on_host(self.tensors[0]):
            placed = device_operations.place(self.announcement, self.tensors, copied=copied)
            if placed is not None:
                announcement, memory, buffers = placed
                return memory, start(name, announcement, buffers)
        memory, buffers = [], []
        for tensor in self.tensors:
            if engine.takes_tensors:
                given = contiguous(tensor, copied=copied)
                buffers.append(TensorBuffer(given.view(-1), dtype_name(given)))
            else:
                given = to_host(tensor) if copied else own_memory(tensor)
                buffers.append(as_buffer(given))
            memory.append(given)
        return memory, start(name, self.announcement, buffers)

    def _finish(self, operation: Operation, memory: Tensors, in_place: bool) -> Tensors:
        """The results of the operation, on the devices of the tensors."""
        if operation.asked.on_device:
            memory = device_operations.receive(operation, memory)
        if self.collect is not None:
            return self.collect(operation)
        pairs = zip(self.tensors, memory, strict=True)
        if in_place:
            return [_overwrite(tensor, result) for tensor, result in pairs]
        return [result if tensor.is_cpu else result.to(tensor.device) for tensor, result in pairs]


class _Differentiable(torch.autograd.Function):
    """Forward: the collective. Backward: its gradient, which is made of collectives that are differentiable too."""

    @staticmethod
    def forward(ctx: Any, collective: Collective[Any], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        memory, operation = collective._start(collective.group.engine.do, False)
        ctx.gradient, ctx.rows = collective.gradient, operation.rows
        return tuple(collective._finish(operation, memory, False))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *ctx.gradient(ctx.rows, grads)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor in contiguous host memory."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own memory where that is contiguous and the host's, else a copy of it there."""
    if not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_conj() or tensor.is_neg():
        return to_host(tensor)
    return tensor.detach() if tensor.requires_grad else tensor


def _overwrite(tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The tensor with the result in it, where the result may have been written there already."""
    if result.data_ptr() == tensor.data_ptr():
        torch.autograd.graph.increment_version(tensor)
    else:
        with torch.no_grad():
            tensor.copy_(result)
    return tensor
