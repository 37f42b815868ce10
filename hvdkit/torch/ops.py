"""Collectives. Horovod's names, arguments and meanings.

All of them: tensors are of a dtype that allreduce() takes, or float8 where nothing is reduced, on any device,
contiguous or not. A call whose name ends in an underscore overwrites them. One with _async returns a handle for poll()
and synchronize(), and the tensors must be left alone until synchronize(). name: the operation's, the same on all ranks;
without one calls of a kind are matched in their order. process_set: the ranks that take part; each of them makes the
same call. Raised at once: NotInitializedError before init(), ValueError on a rank outside of the set, for arguments
that cannot be used and for a name that is under way, TypeError for a dtype that cannot be sent. Raised when the ranks
have been asked: HorovodInternalError on each where they disagree about dtype, shape, op, factors or root.

A call is written once, as a function that returns a Collective, and its forms follow from that (forms.py). Where the
call that waits takes a compression, or returns something else, that function stands for the other forms alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from hvdkit.engine.basics import join_ranks
from hvdkit.engine.compression import reduce_compressed
from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.engine.named import submit as named
from hvdkit.engine.reduce_op import Average, ReduceOp, Sum, choose_op
from hvdkit.torch import collectives
from hvdkit.torch.collective import Collective
from hvdkit.torch.compression import Compression, Compressor
from hvdkit.torch.forms import asynchronous, collective, in_place
from hvdkit.torch.handles import synchronize

Narrow = type[Compressor]

_first: Callable[[Any], torch.Tensor] = itemgetter(0)


@collective
def _allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Collective[torch.Tensor]:
    factors = float(prescale_factor), float(postscale_factor)
    return collectives.allreduce([tensor], average, name, op, factors, process_set, "allreduce()", _first)


@collective
def _grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Collective[list[torch.Tensor]]:
    call, factors = "grouped_allreduce()", (float(prescale_factor), float(postscale_factor))
    group = collectives.check_group(tensors, call)
    return collectives.allreduce(group, average, name, op, factors, process_set, call, list)


allreduce_ = in_place(_allreduce)
allreduce_async = asynchronous(_allreduce)
allreduce_async_ = asynchronous(_allreduce, in_place=True)
grouped_allreduce_ = in_place(_grouped_allreduce)
grouped_allreduce_async = asynchronous(_grouped_allreduce)
grouped_allreduce_async_ = asynchronous(_grouped_allreduce, in_place=True)


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
    if compression is Compression.none:
        return _allreduce(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    return grouped_allreduce([tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set)[
        0
    ]


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
    return list(
        reduce_compressed(
            compression,
            list(tensors),
            choose_op(average, op),
            (prescale_factor, postscale_factor),
            process_set.group("grouped_allreduce()").size,
            lambda tensors, op, factors: _grouped_allreduce(tensors, None, name, op, *factors, process_set),
        )
    )


@collective
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Collective[torch.Tensor]:
    """Concatenate all ranks' tensors along the first dimension, in rank order, into a new tensor.

    tensor: (n, ...), n may differ between ranks and be 0, the other dimensions and the dtype may not; a scalar counts
    as (1,). The result: (sum of all n, ...), of that dtype: any that allreduce() takes, or a float8.
    Differentiable: each rank gets the average over ranks of the gradients of its rows, as in Horovod.

    Raises NotInitializedError before init(), ValueError on a rank outside of the set and for a name that is under way,
    TypeError for a dtype that cannot be sent, HorovodInternalError on every rank where dtypes or dimensions beyond the
    first disagree, or a rank has left or joined.
    """
    return collectives.allgather([tensor], name, process_set, "allgather()", _first)


@collective
def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Collective[list[torch.Tensor]]:
    """Concatenate several tensors each, as one operation; returns the list of new tensors.

    tensors: at least one. Shapes, dtypes and what it raises: as allgather(); ValueError also for an empty list.
    """
    call = "grouped_allgather()"
    return collectives.allgather(collectives.check_group(tensors, call), name, process_set, call, list)


allgather_async = asynchronous(allgather)
grouped_allgather_async = asynchronous(grouped_allgather)


@collective
def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Collective[torch.Tensor]:
    """Give every rank a copy of root's tensor, in a new tensor.

    tensor: any shape and any dtype that allreduce() takes, both the same on all ranks. root_rank: its number in the
    world, also for a process set. Differentiable: the root gets the average of the gradients, as in Horovod.

    Raises NotInitializedError before init(), ValueError for a root that is not in the set, on a rank outside of the set
    and for a name that is under way, TypeError for a dtype that cannot be sent, HorovodInternalError on every rank
    where shapes, dtypes or roots disagree, or a rank has left or joined.
    """
    return collectives.broadcast(tensor, root_rank, name, process_set)


broadcast_ = in_place(broadcast)
broadcast_async = asynchronous(broadcast)
broadcast_async_ = asynchronous(broadcast, in_place=True)


@collective
def _alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Collective[tuple[torch.Tensor, torch.Tensor]]:
    return collectives.alltoall(tensor, splits, name, process_set)


alltoall_async = asynchronous(_alltoall)


def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send each rank its rows of the tensor, and return the rows that came, in rank order.

    tensor: (n, ...), the other dimensions and the dtype alike on all ranks. splits: rows for each rank, as a list or a
    tensor of integers; equal parts if None, and then n divides by the number of ranks (else ValueError).
    Returns the received rows, in a new tensor; with `splits` given a tuple of them and of how many came from each rank,
    an int32 tensor (int64 where that is too narrow); alltoall_async() gives the tuple always.
    Differentiable: gradients go back to where the rows came from.

    Raises NotInitializedError before init(), ValueError on a rank outside of the set, for a name that is under way and
    for splits that are no whole numbers or sum up to more than n, TypeError for a dtype that cannot be sent (it may be
    any that allgather() takes), HorovodInternalError on every rank where dtypes or dimensions beyond the first
    disagree, or a rank has left or joined.
    """
    rows, counts = _alltoall(tensor, splits, name, process_set)
    return rows if splits is None else (rows, counts)


@collective
def _reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Collective[torch.Tensor]:
    factors = float(prescale_factor), float(postscale_factor)
    return collectives.reducescatter([tensor], name, op, factors, process_set, "reducescatter()", _first)


@collective
def _grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Collective[list[torch.Tensor]]:
    call, factors = "grouped_reducescatter()", (float(prescale_factor), float(postscale_factor))
    return collectives.reducescatter(collectives.check_group(tensors, call), name, op, factors, process_set, call, list)


reducescatter_async = asynchronous(_reducescatter)
grouped_reducescatter_async = asynchronous(_grouped_reducescatter)


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
    return list(
        reduce_compressed(
            compression,
            list(tensors),
            op,
            (prescale_factor, postscale_factor),
            process_set.group("grouped_reducescatter()").size,
            lambda tensors, op, factors: _grouped_reducescatter(tensors, name, op, process_set, *factors),
        )
    )


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
    size = process_set.size()

    def wait() -> torch.Tensor:
        all_values, all_indices = synchronize(values), synchronize(indices)
        if op is Average:
            all_values = all_values / size
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape, check_invariants=False).coalesce()

    return wait


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has called it.

    Raises NotInitializedError before init(), ValueError on a rank outside of the set, HorovodInternalError if a rank
    has left.
    """
    named.do(process_set.group("barrier()"), "barrier", None, (), ())


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
