"""Collectives on torch tensors, with Horovod's names, arguments and meanings."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hvdkit.engine import runtime as engine
from hvdkit.errors import HorovodInternalError
from hvdkit.torch.compression import Compression, Compressor, wire_of
from hvdkit.torch.tensors import NAMES, as_buffer, as_tensor
from hvdkit.transport.base import HALF, Op, Transport
from hvdkit.transport.small import gather_bytes, gather_ints


class ReduceOp:
    """What an allreduce does; compared by identity, printed by name."""

    def __init__(self, name: str, kind: Op) -> None:
        self.name, self.kind = name, kind

    def __repr__(self) -> str:
        return f"hvd.{self.name}"


Average = ReduceOp("Average", "sum")
Sum = ReduceOp("Sum", "sum")
Min = ReduceOp("Min", "min")
Max = ReduceOp("Max", "max")
Product = ReduceOp("Product", "product")


def choose_op(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """Horovod's two ways to say what is done: `op`, or the older `average`; Average if neither is given.

    Raises ValueError for both at once, TypeError for something that is no op.
    """
    if average is not None and op is not None:
        raise ValueError(f"average={average} and op={op} say the same thing twice; give only op.")
    if op is None:
        return Sum if average is False else Average
    if not isinstance(op, ReduceOp):
        raise TypeError(f"op is {op!r}; use hvd.Average, hvd.Sum, hvd.Min, hvd.Max or hvd.Product.")
    return op


def _reduce(tensor: torch.Tensor, op: ReduceOp, prescale: float, postscale: float, call: str) -> torch.Tensor:
    """A new contiguous tensor on the same device: the reduction of `tensor` over all ranks."""
    host = _copy_to_host(tensor)
    _reduce_host(host, op, prescale, postscale, call)
    return host.to(tensor.device)


def _reduce_host(host: torch.Tensor, op: ReduceOp, prescale: float, postscale: float, call: str) -> None:
    """Reduce a contiguous CPU tensor over all ranks in place."""
    made = engine.runtime(call)
    divisor = made.transport.size if op is Average else 1
    before, after = (1.0, prescale * postscale) if op in (Average, Sum) else (prescale, postscale)
    scaled = op is Average or (before, after) != (1.0, 1.0)
    if scaled and host.dtype == torch.bool:
        raise TypeError(
            f"{call}: bools can be neither averaged nor scaled; op=hvd.Max asks if any is true, hvd.Min if all are."
        )
    # The sum of float16 may be too large for it where the average is not.
    wide = host.float() if scaled and NAMES.get(host.dtype) in HALF else host
    _scale(wide, before, 1)
    with made.lock:
        made.transport.allreduce(as_buffer(wide), op.kind)
    _scale(wide, after, divisor)
    if wide is not host:
        host.copy_(wide)


def _scale(tensor: torch.Tensor, factor: float, divisor: int) -> None:
    """tensor *= factor / divisor, in place; integers drop the fraction, as Horovod's do."""
    if factor != 1.0:
        wide = tensor if tensor.dtype.is_floating_point else tensor.double()
        tensor.copy_(wide.mul_(factor / divisor))
    elif divisor != 1:
        tensor.div_(divisor, rounding_mode=None if tensor.dtype.is_floating_point else "trunc")


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _on_host(tensor: torch.Tensor) -> bool:
    """Can the transport work on the tensor's own memory?"""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


class _Allreduce(torch.autograd.Function):
    """Forward: y = op(x of all ranks). Backward, for a sum or an average: dx = op(dy of all ranks)."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, op: ReduceOp, prescale: float, postscale: float) -> torch.Tensor:
        ctx.options = (op, prescale, postscale)
        return _reduce(tensor, op, prescale, postscale, "allreduce()")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        op = ctx.options[0]
        if op not in (Average, Sum):
            raise NotImplementedError(f"allreduce() with op={op} has no gradient; detach the tensor, or use hvd.Sum.")
        return _Allreduce.apply(grads[0], *ctx.options), None, None, None


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over all ranks; every rank gets the result, in a new tensor.

    tensor: any shape, the same on all ranks, left as it is; uint8 int8 int16 int32 int64 float16 bfloat16 float32
    float64 bool, on any device. Integers are averaged by division that drops the fraction.
    op: Average (the default), Sum, Min, Max or Product. average: the older way to say Average (True) or Sum (False).
    compression: what is sent instead of float32 and float64. prescale_factor, postscale_factor: before and after.
    Differentiable for Sum and Average: the gradient is reduced in the same way.
    Raises NotInitializedError before init(), TypeError for a dtype that cannot be sent, or averages of bools.
    """
    chosen = choose_op(average, op)
    size = engine.runtime("allreduce()").transport.size
    if wire_of(compression) == "none" or tensor.dtype not in (torch.float32, torch.float64):
        reduced: torch.Tensor = _Allreduce.apply(tensor, chosen, prescale_factor, postscale_factor)
        return reduced
    if chosen is Average:  # each rank sends its part of the average, and the parts together fit the wire
        tensor = _clamp(tensor * (prescale_factor * postscale_factor / size), compression, size)
        chosen, prescale_factor, postscale_factor = Sum, 1.0, 1.0
    small, context = compression.compress(tensor * prescale_factor)
    narrow: torch.Tensor = _Allreduce.apply(small, chosen, 1.0, 1.0)
    return compression.decompress(narrow, context).mul(postscale_factor)


def _clamp(tensor: torch.Tensor, compression: type[Compressor], terms: int) -> torch.Tensor:
    """The tensor with finite values so small that the sum of as many `terms`, rounded twice, is finite on the wire."""
    wire = torch.finfo(getattr(torch, compression.wire))
    limit = wire.max / terms * (1 - wire.eps)
    return torch.where(torch.isinf(tensor), tensor, tensor.clamp(-limit, limit))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over all ranks in place, and return it; arguments and errors as for allreduce()."""
    chosen = choose_op(average, op)
    if _on_host(tensor):
        _reduce_host(tensor.detach(), chosen, prescale_factor, postscale_factor, "allreduce_()")
        torch.autograd.graph.increment_version(tensor)
    else:
        with torch.no_grad():
            tensor.copy_(_reduce(tensor, chosen, prescale_factor, postscale_factor, "allreduce_()"))
    return tensor


def _gather(tensor: torch.Tensor, transport: Transport) -> tuple[torch.Tensor, list[int]]:
    """All ranks' tensors, one after another along the first dimension, and each rank's share of it."""
    data = tensor.detach().cpu().contiguous()
    shape = data.shape if data.dim() else torch.Size([1])
    described = gather_bytes(transport, f"{data.dtype}{list(shape[1:])}".encode())
    if len(set(described)) > 1:
        seen = "; ".join(f"rank {rank}: {text.decode()}" for rank, text in enumerate(described))
        raise HorovodInternalError(
            f"allgather() needs one dtype and, but for the first dimension, one shape on all ranks. Seen: {seen}."
        )
    rows = gather_ints(transport, shape[0])
    width = int(np.prod(shape[1:], dtype=np.int64))
    joined = transport.allgather(as_buffer(data), [count * width for count in rows])
    return as_tensor(joined).view(sum(rows), *shape[1:]).to(tensor.device), rows


class _Allgather(torch.autograd.Function):
    """Forward: y = concatenation of x of all ranks. Backward: this rank's rows of the sum of dy over all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        made = engine.runtime("allgather()")
        with made.lock:
            gathered, rows = _gather(tensor, made.transport)
        ctx.start, ctx.rows = sum(rows[: made.transport.rank]), rows[made.transport.rank]
        ctx.shape = tensor.shape
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = _Allreduce.apply(grads[0], Sum, 1.0, 1.0)
        return summed.narrow(0, ctx.start, ctx.rows).view(ctx.shape)


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Concatenate all ranks' tensors along the first dimension, in rank order, into a new tensor.

    tensor: (n, ...), n may differ between ranks and be 0, the other dimensions and the dtype may not; a scalar counts
    as (1,). Differentiable: each rank gets the sum of the gradients of its rows.
    Raises HorovodInternalError on every rank if dtypes or shapes disagree, NotInitializedError before init().
    """
    gathered: torch.Tensor = _Allgather.apply(tensor)
    return gathered


def _check_root(root_rank: int, size: int) -> None:
    if not 0 <= root_rank < size:
        raise ValueError(f"root_rank is {root_rank}; there are {size} ranks, from 0 to {size - 1}.")


def _broadcast(tensor: torch.Tensor, root_rank: int, call: str) -> torch.Tensor:
    made = engine.runtime(call)
    _check_root(root_rank, made.transport.size)
    host = _copy_to_host(tensor)
    with made.lock:
        made.transport.broadcast(as_buffer(host), root_rank)
    return host.to(tensor.device)


class _Broadcast(torch.autograd.Function):
    """Forward: y = x of the root. Backward: on the root the sum of dy over all ranks, elsewhere zero."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int) -> torch.Tensor:
        ctx.root_rank = root_rank
        return _broadcast(tensor, root_rank, "broadcast()")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed: torch.Tensor = _Allreduce.apply(grads[0], Sum, 1.0, 1.0)
        mine = engine.runtime("broadcast()").transport.rank == ctx.root_rank
        return summed if mine else torch.zeros_like(summed), None


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Give every rank a copy of root's tensor, in a new tensor.

    tensor: the same shape and dtype on all ranks. Differentiable: the root gets the sum of the gradients.
    Raises ValueError for a root that does not exist, NotInitializedError before init().
    """
    copied: torch.Tensor = _Broadcast.apply(tensor, root_rank)
    return copied


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Overwrite a tensor with root's, and return it; arguments and errors as for broadcast()."""
    with torch.no_grad():
        tensor.copy_(_broadcast(tensor, root_rank, "broadcast_()"))
    return tensor


__all__ = [
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "allgather",
    "allreduce",
    "allreduce_",
    "broadcast",
    "broadcast_",
]
