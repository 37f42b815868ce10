"""Collectives that return at once, with a handle for poll() and synchronize(). Horovod's names, arguments and meanings.

All of them: tensors are of a dtype that allreduce() takes, or float8 where nothing is reduced, on any device,
contiguous or not; those of a call with a trailing underscore are overwritten, and must be left alone until
synchronize(). name: the operation's, the same on all ranks; without one calls of a kind are matched in their order.
process_set: the ranks that take part. Raised at once: NotInitializedError before init(), ValueError on a rank outside
of the set, for arguments that cannot be used and for a name that is under way, TypeError for a dtype that cannot be
sent. Raised by synchronize(), on every rank: HorovodInternalError where the ranks disagree about dtype, shape, op,
factors or root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.engine.named.submit import find_group
from hvdkit.engine.reduce_op import Average, ReduceOp, Sum, choose_op
from hvdkit.torch.handles import Handle, synchronize
from hvdkit.torch.submit import (
    begin,
    check_group,
    run_allreduce,
    run_broadcast,
    start_allgather,
    start_alltoall,
    start_reducescatter,
)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to reduce a tensor over all ranks; synchronize() returns the result in a new tensor.

    Shapes, dtypes, arguments and what it raises: as allreduce(), but what ranks disagree about is raised by
    synchronize(). Not differentiable. The caller leaves the tensors alone until then.
    """
    factors = (prescale_factor, postscale_factor)
    chosen = choose_op(average, op)
    return run_allreduce(
        begin, [tensor], name, chosen, factors, process_set, in_place=False, call="allreduce_async()", single=True
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to reduce a tensor over all ranks in place; synchronize() returns the tensor.

    Shapes, dtypes, arguments and what it raises: as allreduce(), but what ranks disagree about is raised by
    synchronize(). Not differentiable. The caller leaves the tensors alone until then.
    """
    factors = (prescale_factor, postscale_factor)
    chosen = choose_op(average, op)
    return run_allreduce(
        begin, [tensor], name, chosen, factors, process_set, in_place=True, call="allreduce_async_()", single=True
    )


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to reduce several tensors as one operation; synchronize() returns the list of new tensors.

    Shapes, dtypes, arguments and what it raises: as grouped_allreduce(), but what ranks disagree about is raised by
    synchronize(). Not differentiable. The caller leaves the tensors alone until then.
    """
    call = "grouped_allreduce_async()"
    made, factors = check_group(tensors, call), (prescale_factor, postscale_factor)
    chosen = choose_op(average, op)
    return run_allreduce(begin, made, name, chosen, factors, process_set, in_place=False, call=call, single=False)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to reduce several tensors in place as one operation; synchronize() returns the list of them.

    Shapes, dtypes, arguments and what it raises: as grouped_allreduce(), but what ranks disagree about is raised by
    synchronize(). Not differentiable. The caller leaves the tensors alone until then.
    """
    call = "grouped_allreduce_async_()"
    made, factors = check_group(tensors, call), (prescale_factor, postscale_factor)
    chosen = choose_op(average, op)
    return run_allreduce(begin, made, name, chosen, factors, process_set, in_place=True, call=call, single=False)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begin to add up sparse tensors of all ranks; calling what is returned waits, and gives the sum, coalesced.

    tensor: COO, of the same shape and dtype on all ranks, any number of entries. op: Average or Sum, else ValueError.
    What it and what is returned raise: as allgather(), which it is made of.
    """
    if op not in (Average, Sum):
        raise ValueError(f"op is {op!r}; sparse tensors are reduced with hvd.Average or hvd.Sum.")
    local = tensor.coalesce() if not tensor.is_coalesced() else tensor
    indices = allgather_async(local.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(local.values(), f"{name}.values", process_set)
    size = find_group(process_set, "sparse_allreduce_async()").transport.size

    def wait() -> torch.Tensor:
        all_values, all_indices = synchronize(values), synchronize(indices)
        if op is Average:
            all_values = all_values / size
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape, check_invariants=False).coalesce()

    return wait


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to concatenate all ranks' tensors; synchronize() returns them in a new tensor.

    Shapes, dtypes, arguments and what it raises: as allgather(), but what ranks disagree about is raised by
    synchronize(). Not differentiable. The caller leaves the tensors alone until then.
    """
    return start_allgather([tensor], name, process_set, call="allgather_async()", single=True)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to concatenate several tensors each as one operation; synchronize() returns the list of new tensors.

    Shapes, dtypes, arguments and what it raises: as grouped_allgather(), but what ranks disagree about is raised by
    synchronize(). Not differentiable. The caller leaves the tensors alone until then.
    """
    made = check_group(tensors, "grouped_allgather_async()")
    return start_allgather(made, name, process_set, call="grouped_allgather_async()", single=False)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to give every rank root's tensor; synchronize() returns it in a new tensor.

    Shapes, dtypes, arguments and what it raises: as broadcast(), but what ranks disagree about is raised by
    synchronize(). Not differentiable. The caller leaves the tensors alone until then.
    """
    return run_broadcast(begin, tensor, root_rank, name, process_set, in_place=False, call="broadcast_async()")


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to overwrite the tensor with root's; synchronize() returns the tensor.

    Shapes, dtypes, arguments and what it raises: as broadcast(), but what ranks disagree about is raised by
    synchronize(). Not differentiable. The caller leaves the tensors alone until then.
    """
    return run_broadcast(begin, tensor, root_rank, name, process_set, in_place=True, call="broadcast_async_()")


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to send each rank its rows; synchronize() returns the received rows and how many came from each rank.

    Shapes, dtypes, arguments and what it raises: as alltoall(), but what ranks disagree about is raised by
    synchronize(). Not differentiable. The caller leaves the tensors alone until then.
    """
    return start_alltoall(tensor, splits, name, process_set, call="alltoall_async()")


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin to reduce a tensor and give each rank its rows; synchronize() returns them in a new tensor.

    Shapes, dtypes, arguments and what it raises: as reducescatter(), but what ranks disagree about is raised by
    synchronize(). Not differentiable. The caller leaves the tensors alone until then.
    """
    call, factors = "reducescatter_async()", (prescale_factor, postscale_factor)
    return start_reducescatter([tensor], name, _scattered(op), factors, process_set, call=call, single=True)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin to reduce and scatter several tensors as one operation; synchronize() returns the list of results.

    Shapes, dtypes, arguments and what it raises: as grouped_reducescatter(), but what ranks disagree about is raised by
    synchronize(). Not differentiable. The caller leaves the tensors alone until then.
    """
    call, factors = "grouped_reducescatter_async()", (prescale_factor, postscale_factor)
    made = check_group(tensors, call)
    return start_reducescatter(made, name, _scattered(op), factors, process_set, call=call, single=False)


def _scattered(op: ReduceOp) -> ReduceOp:
    if op not in (Average, Sum):
        raise NotImplementedError(f"op is {op!r}; reducescatter() does hvd.Average and hvd.Sum.")
    return op
