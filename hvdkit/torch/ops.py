"""Collectives that wait for their result, and are differentiable. Horovod's names, arguments and meanings.

What is said in asynchronous.py about tensors, names, process sets and errors holds here too; each call is one of those
and synchronize(). Every rank of the set makes the same call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdkit.engine.basics import join_ranks
from hvdkit.engine.compression import Factors, reduce_compressed
from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.engine.named.submit import find_group
from hvdkit.engine.reduce_op import Average, ReduceOp, choose_op
from hvdkit.torch import differentiable as autograd
from hvdkit.torch.compression import Compression, Compressor
from hvdkit.torch.submit import check_group, do, do_barrier, run_allreduce, run_broadcast

Narrow = type[Compressor]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Narrow = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over all ranks; every rank gets the result, in a new tensor of the same shape and dtype.

    tensor: any shape, of dtype uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64,
    complex64 or complex128 (not for Min and Max), or bool (for Min, Max, Sum and Product, which are its "and" and
    "or"); shape and dtype the same on all ranks; left as it is. float8 is moved by the other collectives, and not
    reduced. Averages of integers are exact, whatever their sum comes to, and drop the fraction; sums of integers wrap.
    float16 and bfloat16 are summed in float32.
    op: Average (the default), Sum, Min, Max, Product or, for floating point, Adasum. average: the older way to say
    Average or Sum. name: the same on all ranks; without one calls are matched in their order.
    compression: what is sent instead of float32 and float64. prescale_factor, postscale_factor: multiplied with before
    and after. process_set: the ranks that take part.
    Differentiable for Average and Sum: the gradient is reduced in the same way.

    Raises NotInitializedError before init(), ValueError on a rank outside of the set, for a name that is under way, and
    for both `average` and `op`; TypeError for a dtype that cannot be sent or reduced so; HorovodInternalError on every
    rank where shapes, dtypes, ops or factors disagree, or a rank has left.
    """
    chosen = choose_op(average, op)
    size = find_group(process_set, "allreduce()").transport.size

    def reduce(tensors: Sequence[torch.Tensor], op: ReduceOp, factors: Factors) -> Sequence[torch.Tensor]:
        return [autograd.allreduce(tensors[0], name, op, factors, process_set)]

    factors = (prescale_factor, postscale_factor)
    reduced: torch.Tensor = reduce_compressed(compression, [tensor], chosen, factors, size, reduce)[0]
    return reduced


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over all ranks in place, and return it.

    tensor: overwritten on every rank; a slice or a view with gaps will do. Not differentiable. Shapes, dtypes,
    arguments and what it raises: as allreduce().
    """
    return _reduce_in_place(
        [tensor], choose_op(average, op), name, (prescale_factor, postscale_factor), process_set, "allreduce_()"
    )[0]


def _reduce_in_place(
    tensors: list[torch.Tensor],
    op: ReduceOp,
    name: str | None,
    factors: tuple[float, float],
    process_set: ProcessSet,
    call: str,
) -> list[torch.Tensor]:
    reduced: list[torch.Tensor] = run_allreduce(
        do, tensors, name, op, factors, process_set, in_place=True, call=call, single=False
    )
    return reduced


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Narrow = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors as one operation, none before all of them are there on all ranks; returns new tensors.

    tensors: at least one, of any shapes and dtypes, the same list on all ranks. All else, and what it raises: as
    allreduce(); ValueError also for an empty list.
    """
    chosen = choose_op(average, op)
    size = find_group(process_set, "grouped_allreduce()").transport.size

    def reduce(tensors: Sequence[torch.Tensor], op: ReduceOp, factors: Factors) -> Sequence[torch.Tensor]:
        reduced: tuple[torch.Tensor, ...] = autograd.GroupedAllreduce.apply(name, op, factors, process_set, *tensors)
        return reduced

    factors = (prescale_factor, postscale_factor)
    return list(reduce_compressed(compression, list(tensors), chosen, factors, size, reduce))


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors in place as one operation, and return them.

    tensors: overwritten. Shapes, dtypes, arguments and what it raises: as grouped_allreduce(). Not differentiable.
    """
    call, factors = "grouped_allreduce_()", (prescale_factor, postscale_factor)
    return _reduce_in_place(check_group(tensors, call), choose_op(average, op), name, factors, process_set, call)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate all ranks' tensors along the first dimension, in rank order, into a new tensor.

    tensor: (n, ...), n may differ between ranks and be 0, the other dimensions and the dtype may not; a scalar counts
    as (1,). The result: (sum of all n, ...), of that dtype: any that allreduce() takes, or a float8.
    Differentiable: each rank gets the average over ranks of the gradients of its rows, as in Horovod.

    Raises NotInitializedError before init(), ValueError on a rank outside of the set and for a name that is under way,
    TypeError for a dtype that cannot be sent, HorovodInternalError on every rank where dtypes or dimensions beyond the
    first disagree, or a rank has left or joined.
    """
    gathered: torch.Tensor = autograd.Allgather.apply(tensor, name, process_set)
    return gathered


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Concatenate several tensors each, as one operation; returns the list of new tensors.

    tensors: at least one. Shapes, dtypes and what it raises: as allgather(); ValueError also for an empty list.
    """
    return list(autograd.GroupedAllgather.apply(name, process_set, *tensors))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Give every rank a copy of root's tensor, in a new tensor.

    tensor: any shape and any dtype that allreduce() takes, both the same on all ranks. root_rank: its number in the
    world, also for a process set. Differentiable: the root gets the average of the gradients, as in Horovod.

    Raises NotInitializedError before init(), ValueError for a root that is not in the set, on a rank outside of the set
    and for a name that is under way, TypeError for a dtype that cannot be sent, HorovodInternalError on every rank
    where shapes, dtypes or roots disagree, or a rank has left or joined.
    """
    copied: torch.Tensor = autograd.Broadcast.apply(tensor, root_rank, name, process_set)
    return copied


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite a tensor with root's, and return it.

    Shapes, dtypes, arguments and what it raises: as broadcast(). Not differentiable.
    """
    copied: torch.Tensor = run_broadcast(do, tensor, root_rank, name, process_set, in_place=True, call="broadcast_()")
    return copied


def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send each rank its rows of the tensor, and return the rows that came, in rank order.

    tensor: (n, ...), the other dimensions and the dtype alike on all ranks. splits: rows for each rank, as a list or a
    tensor of integers; equal parts if None, and then n divides by the number of ranks (else ValueError).
    Returns the received rows, in a new tensor; with `splits` given a tuple of them and of how many came from each rank,
    an int32 tensor (int64 where that is too narrow). Differentiable: gradients go back to where the rows came from.

    Raises NotInitializedError before init(), ValueError on a rank outside of the set, for a name that is under way and
    for splits that are no whole numbers or sum up to more than n, TypeError for a dtype that cannot be sent (it may be
    any that allgather() takes), HorovodInternalError on every rank where dtypes or dimensions beyond the first
    disagree, or a rank has left or joined.
    """
    received, counts = autograd.Alltoall.apply(tensor, splits, name, process_set)
    return received if splits is None else (received, counts)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Narrow = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over all ranks, and give each rank its rows of the result, in a new tensor.

    tensor: (n, ...), shape and dtype the same on all ranks, any dtype that allreduce() takes; rank i gets n // size
    rows, and one more if i < n % size. op: Average or Sum. The other arguments: as allreduce()'s.
    Differentiable: the gradients of all rows are gathered.

    Raises NotInitializedError before init(), ValueError on a rank outside of the set, for a scalar and for a name that
    is under way, NotImplementedError for another op, TypeError for a dtype that cannot be reduced so,
    HorovodInternalError on every rank where shapes, dtypes, ops or factors disagree, or a rank has left or joined.
    """
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Narrow = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce and scatter several tensors as one operation; returns the list of new tensors.

    tensors: at least one, the same list on all ranks. Shapes, dtypes, arguments and what it raises: as
    reducescatter(); ValueError also for an empty list.
    """
    size = find_group(process_set, "reducescatter()").transport.size

    def reduce(tensors: Sequence[torch.Tensor], op: ReduceOp, factors: Factors) -> Sequence[torch.Tensor]:
        rows: tuple[torch.Tensor, ...] = autograd.GroupedReducescatter.apply(name, op, factors, process_set, *tensors)
        return rows

    factors = (prescale_factor, postscale_factor)
    return list(reduce_compressed(compression, list(tensors), op, factors, size, reduce))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has called it.

    Raises NotInitializedError before init(), ValueError on a rank outside of the set, HorovodInternalError if a rank
    has left.
    """
    do_barrier(process_set)


def join(device: int = -1) -> int:
    """Have no more work: take part in the other ranks' operations with zeros until all ranks have joined.

    For ranks with different numbers of batches: each calls it after its last `optimizer.step()` of an epoch. It takes
    part in allreduces, barriers and steps of every DistributedOptimizer, those of its process sets too. Averages count
    all ranks, joined ones as zeros. It changes nothing on this rank: its parameters, gradients and optimizer state stay
    what they were at its own last step, and the ranks' parameters are no longer equal; as in Horovod, broadcast them
    from the rank that joined last (`hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.join())`, and
    broadcast_optimizer_state) before training goes on. How it works: hvdkit/engine/named/joining.py.

    device: as in Horovod; not needed here. Returns the number of the rank that joined last.
    Raises NotInitializedError before init(), HorovodInternalError if a rank leaves without joining, RankLostError if
    one dies. Anything else that the others do meanwhile (allgather, broadcast_object, ...) fails on all of them.
    """
    return join_ranks()
