"""Collectives; allreduce() is in reduce.py. Horovod's names, arguments and meanings.

Tensors may be on any device, contiguous or not, of any dtype that allreduce() takes; float8 only where nothing is
reduced. A call whose name ends in an underscore overwrites its tensors. A call with _async returns a handle for poll()
and synchronize(); do not read or change the tensors before synchronize() has returned.

Tensors on GPUs: if the ranks can use NCCL (see Config.device_transport), the numbers stay in GPU memory. The host then
does not wait for the GPU: the result is ready for the current stream of the thread that receives it, and poll() is
true when the work has been enqueued on the GPU. If a rank is lost, the work ends; the next call raises RankLostError.
NCCL sums float16 and bfloat16 and rounds after each addition; factors, and the division of an average, are applied
before the sum. Without NCCL all operations use host memory, and with NCCL these: Adasum; int16 and uint16; averages
and factors of integers; factors of Min, Max and Product; complex products. The tensors of an operation must be on GPUs
on all ranks, or on the host on all ranks. Tensors on a rank's second GPU are copied to its first. Untried on a GPU.

name: of the operation, the same on all ranks; without a name, calls of one kind are matched in the order of the calls.
process_set: the ranks that take part; each of them makes the same call.

Errors that are raised at once: NotInitializedError before init(), ValueError on a rank outside of the set, for invalid
arguments and for the name of an operation that is not complete, TypeError for a dtype that cannot be sent. After the
ranks have compared their calls: HorovodInternalError on every rank if dtypes, shapes, ops, factors or roots differ.

A call is written once, as a function that returns a Collective; collective.py makes its forms. If the blocking call
takes a compression, or returns something else, that function is used for the other forms only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdkit.engine.basics import join_ranks
from hvdkit.engine.compression import Factors, reduce_compressed
from hvdkit.engine.groups import ProcessSet, global_process_set, group_of
from hvdkit.engine.named.execution import split_rows
from hvdkit.engine.named.operation import Operation, OperationRequest
from hvdkit.engine.named.submit import check_splits, do, root_options
from hvdkit.engine.reduce_op import Average, ReduceOp, Sum, choose_op
from hvdkit.torch import handles
from hvdkit.torch.collective import (
    Collective,
    Result,
    Rows,
    Tensors,
    asynchronous,
    collective,
    in_place,
    uncompiled_later,
)
from hvdkit.torch.compression import Compression
from hvdkit.torch.reduce import Described, Narrow, announce, announce_reduction, check_group, first, mean
from hvdkit.torch.refusals import check_numbers
from hvdkit.torch.tensors import as_tensor
from hvdkit.transport.buffer import Buffer

poll, synchronize = uncompiled_later(handles.poll), uncompiled_later(handles.synchronize)


def _in_rows(tensors: Tensors) -> Described:
    """Describe tensors for operations that gather along the first dimension: a scalar has shape (1,)."""
    return tuple([(tensor.dtype, tensor.shape or (1,)) for tensor in tensors])


def _shape(result: Buffer, shape: tuple[int, ...], tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers in this shape, on the device of the tensor."""
    return as_tensor(result).view(shape).to(tensor.device)


def _make_allgather(
    tensors: Tensors, name: str | None, process_set: ProcessSet, call: str, pack: Callable[[Any], Result]
) -> Collective[Result]:
    """Results: x of all ranks, concatenated. Gradient: this rank's rows of the average of dy."""
    group, shapes = group_of(process_set, call), [tensor.shape for tensor in tensors]

    def collect(operation: Operation) -> Tensors:
        results = []
        for at, (result, tensor) in enumerate(zip(operation.results, tensors, strict=True)):
            shape = (sum(rows[at] for rows in operation.rows), *tensor.shape[1:])
            results.append(_shape(result, shape, tensor))
        return results

    def gradient(rows: Rows, grads: Tensors) -> Tensors:
        rank, own = group.transport.rank, []
        for at, (grad, shape) in enumerate(zip(mean(grads, process_set), shapes, strict=True)):
            counts = [each[at] for each in rows]
            own.append(grad.narrow(0, sum(counts[:rank]), counts[rank]).view(shape))
        return own

    announcement = announce("allgather", _in_rows(tensors))
    return Collective(group, announcement, name, tensors, pack, gradient, collect, overwrites=False)


@collective
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Collective[torch.Tensor]:
    """Concatenate all ranks' tensors along the first dimension, in rank order, into a new tensor.

    tensor: shape (n, ...). n may differ between ranks and may be 0; the other dimensions and the dtype must be the same
    on all ranks. A scalar counts as shape (1,). dtype: any that allreduce() takes, or a float8.
    Returns a tensor of shape (sum of all n, ...) and the same dtype.
    Differentiable: each rank gets the average over ranks of the gradients of its rows, as in Horovod.

    Raises NotInitializedError before init(); ValueError on a rank outside of the set, and for the name of an operation
    that is not complete; TypeError for a dtype that cannot be sent; HorovodInternalError on every rank if dtypes or
    dimensions after the first differ between ranks, or a rank has left or joined.
    """
    return _make_allgather([tensor], name, process_set, "allgather()", first)


@collective
def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Collective[list[torch.Tensor]]:
    """Gather several tensors as one operation, each as allgather() does; returns the list of new tensors.

    tensors: at least one. Shapes, dtypes and what it raises: as allgather(); ValueError also for an empty list.
    """
    call = "grouped_allgather()"
    return _make_allgather(check_group(tensors, call), name, process_set, call, list)


allgather_async = asynchronous(allgather)
grouped_allgather_async = asynchronous(grouped_allgather)


@collective
def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Collective[torch.Tensor]:
    """Send the tensor of rank root_rank to all ranks; returns a new tensor.

    tensor: any shape and any dtype that allreduce() takes, both the same on all ranks.
    root_rank: a rank of the whole job, also for a process set.
    Differentiable: the root gets the average of the gradients, as in Horovod; the other ranks get zeros.

    Raises NotInitializedError before init(); ValueError for a root or a rank outside of the set, and for the name of an
    operation that is not complete; TypeError for a dtype that cannot be sent; HorovodInternalError on every rank
    if shapes, dtypes or roots differ between ranks, or a rank has left or joined.
    """
    group = group_of(process_set, "broadcast()")
    described = ((tensor.dtype, tensor.shape),)
    announcement = announce("broadcast", described, root_options(process_set, root_rank, "broadcast()"))

    def gradient(_: Rows, grads: Tensors) -> Tensors:
        means = mean(grads, process_set)
        return means if group.this_rank == root_rank else [torch.zeros_like(means[0])]

    return Collective(group, announcement, name, [tensor], first, gradient)


broadcast_ = in_place(broadcast)
broadcast_async = asynchronous(broadcast)
broadcast_async_ = asynchronous(broadcast, in_place=True)


@collective
def _alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Collective[tuple[torch.Tensor, torch.Tensor]]:
    call = "alltoall()"
    group, shape = group_of(process_set, call), tensor.shape
    rank, size = group.transport.rank, group.transport.size
    counts = check_splits(shape[0] if shape else 1, _as_list(splits, size, call), size, call)

    def collect(operation: Operation) -> Tensors:
        received = [rows[rank] for rows in operation.rows]
        fits = max(received) < 2**31  # else int64, which Horovod does not return here
        rows = _shape(operation.results[0], (sum(received), *shape[1:]), tensor)
        return [rows, torch.tensor(received, dtype=torch.int32 if fits else torch.int64)]

    def gradient(rows: Rows, grads: Tensors) -> Tensors:
        received = [each[rank] for each in rows]
        back, _ = _alltoall(grads[0], received, None, process_set)
        unsent = (shape[0] if shape else 1) - back.shape[0]  # rows that were sent to no rank
        if unsent:
            back = torch.cat([back, back.new_zeros(unsent, *back.shape[1:])])
        return [back.view(shape)]

    announcement = OperationRequest("alltoall", announce("alltoall", _in_rows([tensor])).tensors, (), counts)
    return Collective(group, announcement, name, [tensor], tuple, gradient, collect, overwrites=False)


alltoall_async = asynchronous(_alltoall)


def _as_list(splits: Any, size: int, call: str) -> Any:
    """Return the splits as a list of integers; None, also for an empty tensor, means equal numbers of rows."""
    if not isinstance(splits, torch.Tensor):
        return splits
    if splits.numel() and (splits.is_floating_point() or splits.dim() != 1):
        raise ValueError(
            f"{call}: splits must hold one integer for each of the {size} ranks; got a tensor of {splits.dtype} and "
            f"shape {list(splits.shape)}."
        )
    return splits.tolist() or None


def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send each rank its rows of the tensor, and return the received rows in rank order.

    tensor: shape (n, ...); the other dimensions and the dtype must be the same on all ranks. dtype: as for allgather().
    splits: the number of rows for each rank, shape (size,), a list or tensor of integers. None: equal numbers; n must
    then be a multiple of the number of ranks (else ValueError).
    Returns the received rows in a new tensor. If `splits` is given, returns a tuple of them and of the number of rows
    from each rank, an int32 tensor of shape (size,) (int64 if a number exceeds int32). alltoall_async() always
    returns the tuple.
    Differentiable: the gradient of each row is sent back to the rank that the row came from.

    Raises NotInitializedError before init(); ValueError on a rank outside of the set, for the name of an operation that
    is not complete, and for splits that are not integers or whose sum exceeds n; TypeError for a dtype that cannot be
    sent; HorovodInternalError on every rank if dtypes or dimensions after the first differ between ranks, or a rank has
    left or joined.
    """
    rows, counts = _alltoall(tensor, splits, name, process_set)
    return rows if splits is None else (rows, counts)


def _make_reducescatter(
    tensors: Tensors,
    name: str | None,
    op: ReduceOp,
    factors: Factors,
    process_set: ProcessSet,
    call: str,
    pack: Callable[[Any], Result],
) -> Collective[Result]:
    """Results: this rank's rows of op(x of all ranks). Gradient: dx = all ranks' dy, times size for a sum."""
    group = group_of(process_set, call)
    rank, size = group.transport.rank, group.transport.size
    described = tuple([(tensor.dtype, tensor.shape) for tensor in tensors])
    chosen = choose_op(None, op, call)
    announcement = announce_reduction("reducescatter", described, chosen, *factors, call)
    if not all(tensor.dim() for tensor in tensors):
        raise ValueError(f"{call}: a scalar has no rows to scatter; give a tensor of at least one dimension.")

    def collect(operation: Operation) -> Tensors:
        return [
            _shape(result, (split_rows(tensor.shape[0], size)[rank], *tensor.shape[1:]), tensor)
            for tensor, result in zip(tensors, operation.results, strict=True)
        ]

    def gradient(_: Rows, grads: Tensors) -> Tensors:
        gathered = _make_allgather(grads, None, process_set, "allgather()", list).do_differentiably()
        factor = factors[0] * factors[1] * (1 if chosen is Average else size)
        return [grad * factor for grad in gathered]

    prescaled = factors[0] != 1.0  # in the memory that the operation is given
    return Collective(group, announcement, name, tensors, pack, gradient, collect, overwrites=prescaled)


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
    return _make_reducescatter([tensor], name, op, factors, process_set, "reducescatter()", first)


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
    return _make_reducescatter(check_group(tensors, call), name, op, factors, process_set, call, list)


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
    """Reduce a tensor over all ranks; each rank gets its rows of the result, in a new tensor.

    tensor: shape (n, ...); shape and dtype the same on all ranks; any dtype that allreduce() takes. Rank i gets
    n // size rows, and one more if i < n % size.
    op: Average or Sum.
    The other arguments: as for allreduce().
    Differentiable: the gradients of all rows are gathered.

    Raises NotInitializedError before init(); ValueError on a rank outside of the set, for a scalar, and for the name of
    an operation that is not complete; NotImplementedError for another op; TypeError for a dtype that cannot be reduced
    with this op; HorovodInternalError on every rank if shapes, dtypes, ops or factors differ between ranks, or a rank
    has left or joined.
    """
    if compression is Compression.none:
        return _reducescatter(tensor, name, op, process_set, prescale_factor, postscale_factor)
    check_numbers([tensor], "reducescatter")
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

    tensors: at least one, the same list on all ranks.
    The other arguments, shapes, dtypes and what it raises: as for reducescatter(); ValueError also for an empty list.
    """
    if compression is not Compression.none:
        check_numbers(tensors := list(tensors), "grouped_reducescatter")
    return list(
        reduce_compressed(
            compression,
            list(tensors),
            op,
            (prescale_factor, postscale_factor),
            group_of(process_set, "grouped_reducescatter()").size,
            lambda tensors, op, factors: _grouped_reducescatter(tensors, name, op, process_set, *factors),
        )
    )


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start to reduce a sparse tensor over all ranks; returns a function that waits and returns the result, coalesced.

    tensor: COO format, with the same shape and dtype on all ranks and any number of entries.
    name: of the operation, the same on all ranks.
    op: Average or Sum, else ValueError.
    Raises TypeError for another format. Both calls raise the errors of allgather(), which carries out the reduction.
    """
    if op not in (Average, Sum):
        raise ValueError(
            f"sparse_allreduce_async(): op is {op!r}; sparse tensors can be reduced with hvd.Average or hvd.Sum only."
        )
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        what = f"one of layout {tensor.layout}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(
            f"sparse_allreduce_async() takes sparse COO tensors, not {what}. Use hvd.allreduce_async() for dense "
            "tensors, and tensor.to_sparse() for those of another sparse layout."
        )
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


@uncompiled_later
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set has called barrier().

    Raises NotInitializedError before init(), ValueError on a rank outside of the set, HorovodInternalError if a rank
    has left.
    """
    do(group_of(process_set, "barrier()"), "barrier", None, (), ())


@uncompiled_later
def join(device: int = -1) -> int:
    """Contribute zeros to the operations of the other ranks until all ranks have called join().

    For ranks with different numbers of batches: each rank calls it after its last `optimizer.step()` of an epoch. A
    joined rank takes part in allreduces, barriers and steps of every DistributedOptimizer, also in its process sets.
    Averages still divide by the number of all ranks. A joined rank keeps its parameters, gradients and optimizer state
    of its own last step, so the parameters differ between ranks afterwards. As in Horovod, broadcast them from the rank
    that joined last before you continue: `hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.join())`, and
    broadcast_optimizer_state(). How it works: hvdkit/engine/named/joining.py.

    device: accepted as in Horovod, and ignored. Returns the rank that joined last.
    Raises NotInitializedError before init(), HorovodInternalError if a rank leaves without joining, RankLostError if a
    rank dies. Other operations (allgather, broadcast_object, ...) fail on all ranks while a rank has joined.
    """
    return join_ranks()
