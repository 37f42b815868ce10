"""Collectives as autograd functions: what each does forward, and what that means backward."""

from __future__ import annotations

from typing import Any

import torch

from hvdkit.engine.groups import ProcessSet
from hvdkit.engine.named.execution import split_rows
from hvdkit.engine.named.submit import find_group
from hvdkit.engine.reduce_op import Average, ReduceOp, Sum
from hvdkit.torch import asynchronous as begin
from hvdkit.torch.handles import operation_of, synchronize
from hvdkit.torch.submit import check_group, do, run_allreduce, run_broadcast, shape_of

Factors = tuple[float, float]


def _check_differentiable(op: ReduceOp) -> None:
    if op not in (Average, Sum):
        raise NotImplementedError(f"allreduce() with op={op} has no gradient; detach the tensor, or use hvd.Sum.")


def allreduce(
    tensor: torch.Tensor, name: str | None, op: ReduceOp, factors: Factors, process_set: ProcessSet
) -> torch.Tensor:
    """A new tensor: the tensors of all ranks reduced; differentiable where it must be."""
    reduced: torch.Tensor
    if tensor.requires_grad and torch.is_grad_enabled():
        reduced = Allreduce.apply(tensor, name, op, factors, process_set)
    else:
        reduced = _reduce([tensor], name, op, factors, process_set, "allreduce()")[0]
    return reduced


def _reduce(
    tensors: list[torch.Tensor], name: str | None, op: ReduceOp, factors: Factors, process_set: ProcessSet, call: str
) -> list[torch.Tensor]:
    reduced: list[torch.Tensor] = run_allreduce(
        do, tensors, name, op, factors, process_set, in_place=False, call=call, single=False
    )
    return reduced


class Allreduce(torch.autograd.Function):
    """Forward: y = op(x of all ranks). Backward, for a sum or an average: dx = op(dy of all ranks)."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str | None, op: ReduceOp, factors: Factors, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.options = (op, factors, process_set)
        return _reduce([tensor], name, op, factors, process_set, "allreduce()")[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, factors, process_set = ctx.options
        _check_differentiable(op)
        return Allreduce.apply(grads[0], None, op, factors, process_set), None, None, None, None


class GroupedAllreduce(torch.autograd.Function):
    """Allreduce for several tensors."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: ReduceOp, factors: Factors, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.options = (op, factors, process_set)
        call = "grouped_allreduce()"
        return tuple(_reduce(check_group(tensors, call), name, op, factors, process_set, call))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, factors, process_set = ctx.options
        _check_differentiable(op)
        return None, None, None, None, *GroupedAllreduce.apply(None, op, factors, process_set, *grads)


class Allgather(torch.autograd.Function):
    """Forward: y = concatenation of x of all ranks. Backward: this rank's rows of the average of dy over all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        handle = begin.allgather_async(tensor, name, process_set)
        operation = operation_of(handle)
        gathered: torch.Tensor = synchronize(handle)
        ctx.rows = [rows[0] for rows in operation.rows]
        ctx.shape, ctx.process_set = tensor.shape, process_set
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        mean = Allreduce.apply(grads[0], None, Average, (1.0, 1.0), ctx.process_set)
        return _rows(mean, ctx.rows, ctx.process_set).view(ctx.shape), None, None


def _rows(mean: torch.Tensor, rows: list[int], process_set: ProcessSet) -> torch.Tensor:
    rank = process_set.rank()
    return mean.narrow(0, sum(rows[:rank]), rows[rank])


class GroupedAllgather(torch.autograd.Function):
    """Allgather for several tensors."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        handle = begin.grouped_allgather_async(tensors, name, process_set)
        operation = operation_of(handle)
        gathered = tuple(synchronize(handle))
        ctx.rows = [[rows[at] for rows in operation.rows] for at in range(len(tensors))]
        ctx.shapes, ctx.process_set = [tensor.shape for tensor in tensors], process_set
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        means = GroupedAllreduce.apply(None, Average, (1.0, 1.0), ctx.process_set, *grads)
        made = [
            _rows(one, rows, ctx.process_set).view(shape)
            for one, rows, shape in zip(means, ctx.rows, ctx.shapes, strict=True)
        ]
        return None, None, *made


class Broadcast(torch.autograd.Function):
    """Forward: y = x of the root. Backward: on the root the average of dy over all ranks, elsewhere zero."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        copied: torch.Tensor = run_broadcast(
            do, tensor, root_rank, name, process_set, in_place=False, call="broadcast()"
        )
        return copied

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        mean = Allreduce.apply(grads[0], None, Average, (1.0, 1.0), ctx.process_set)
        ranks = ctx.process_set.ranks or []
        mine = ranks[ctx.process_set.rank()] == ctx.root_rank
        return mean if mine else torch.zeros_like(mean), None, None, None


class Alltoall(torch.autograd.Function):
    """Forward: rank i's j-th piece goes to rank j. Backward: the gradient of each piece goes back to its rank."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        handle = begin.alltoall_async(tensor, splits, name, process_set)
        made, received = synchronize(handle)
        ctx.received, ctx.shape, ctx.process_set = received, tensor.shape, process_set
        ctx.mark_non_differentiable(received)
        return made, received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        returned, _ = Alltoall.apply(grads[0].contiguous(), ctx.received, None, ctx.process_set)
        rows = ctx.shape[0] if ctx.shape else 1
        if returned.shape[0] < rows:  # rows that went nowhere
            returned = torch.cat([returned, returned.new_zeros(rows - returned.shape[0], *returned.shape[1:])])
        return returned.view(ctx.shape), None, None, None


class GroupedReducescatter(torch.autograd.Function):
    """Forward: this rank's rows of op(x of all ranks). Backward: dx = all ranks' dy, times size for a sum."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: ReduceOp, factors: Factors, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        group = find_group(process_set, "reducescatter()")
        ctx.factor = factors[0] * factors[1] * (1 if op is Average else group.transport.size)
        ctx.process_set = process_set
        ctx.rows = [split_rows(shape_of(tensor)[0], group.transport.size) for tensor in tensors]
        handle = begin.grouped_reducescatter_async(tensors, name, op, process_set, *factors)
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gathered = GroupedAllgather.apply(None, ctx.process_set, *[grad.contiguous() for grad in grads])
        return None, None, None, None, *[one * ctx.factor for one in gathered]
