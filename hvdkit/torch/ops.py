"""Collectives. Horovod's names, arguments and meanings.

Tensors may be on any device, contiguous or not, of any dtype that allreduce() takes; float8 only where nothing is
reduced. A call whose name ends in an underscore overwrites its tensors. A call with _async returns a handle for poll()
and synchronize(); do not read or change the tensors before synchronize() has returned.

Tensors on GPUs: where the ranks can use NCCL (see Config.device_transport) the numbers stay in the memory of the GPUs.
The host then does not wait for the GPU: the result is for the current stream of the thread that asks for it, and poll()
is true when the work has been given to the GPU. A rank that is lost ends the work; the next call raises RankLostError.
Sums of float16 and bfloat16 are NCCL's, which rounds after each addition, and factors, with the division of an average,
are multiplied with before the sum. Through the host's memory go, as all do without NCCL: Adasum; int16 and uint16;
averages and factors of integers; factors of Min, Max and Product; complex products. All ranks' tensors of an operation
are to be on GPUs, or all on the host. A rank's tensors on a second GPU are copied to its first one. Untried on a GPU.

name: of the operation, the same on all ranks; without a name, calls of one kind are matched in the order of the calls.
process_set: the ranks that take part; each of them makes the same call.

Raised at once: NotInitializedError before init(), ValueError on a rank outside of the set, for invalid arguments and
for the name of an operation that is not complete, TypeError for a dtype that cannot be sent. Raised after the ranks
have compared their calls: HorovodInternalError on every rank if they disagree about dtype, shape, op, factors or root.

A call is written once, as a function that returns a Collective, and its forms follow from that (forms.py). Where the
blocking call takes a compression, or returns something else, that function is used for the other forms only.
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

    tensor: any shape; shape and dtype the same on all ranks. It is not changed. dtype: uint8 int8 uint16 int16 uint32
    int32 uint64 int64 float16 bfloat16 float32 float64; complex64 and complex128 except for Min and Max; bool for Min
    and Product (and), Max and Sum (or). float8 cannot be reduced. float16 and bfloat16 are summed in float32. Sums of
    integers wrap on overflow; averages of integers are exact and drop the fraction.
    average: Horovod's older argument; True for op=Average, False for op=Sum.
    name: of the operation, the same on all ranks; without a name, calls are matched in the order of the calls.
    compression: the dtype that is sent instead of float32 and float64.
    op: Average (the default), Sum, Min, Max, Product or, for floating-point dtypes, Adasum.
    prescale_factor, postscale_factor: the tensor is multiplied by them before and after the reduction.
    process_set: the ranks that take part.
    Differentiable for Average and Sum: the gradient is reduced in the same way.

    Raises NotInitializedError before init(); ValueError on a rank outside of the set, for the name of an operation that
    is not complete, and for both `average` and `op`; TypeError for a dtype that cannot be sent, or not with this op;
    HorovodInternalError on every rank if shapes, dtypes, ops or factors differ between ranks, or a rank has left.
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
    """Reduce several tensors as one operation, which starts when all ranks have called it; returns new tensors.

    tensors: at least one, of any shapes and dtypes, the same list on all ranks. The other arguments, and what it
    raises: as allreduce(); ValueError also for an empty list.
    """
    return list(
        reduce_compressed(
            compression,
            list(tensors),
            choose_op(average, op, "grouped_allreduce()"),
            (prescale_factor, postscale_factor),
            collectives.find_group(process_set, "grouped_allreduce()").size,
            lambda tensors, op, factors: _grouped_allreduce(tensors, None, name, op, *factors, process_set),
        )
    )


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
    return collectives.allgather([tensor], name, process_set, "allgather()", _first)


@collective
def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Collective[list[torch.Tensor]]:
    """Gather several tensors as one operation, each as allgather() does; returns the list of new tensors.

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
    """Send the tensor of rank root_rank to all ranks; returns a new tensor.

    tensor: any shape and any dtype that allreduce() takes, both the same on all ranks.
    root_rank: a rank of the whole job, also for a process set.
    Differentiable: the root gets the average of the gradients, as in Horovod; the other ranks get zeros.

    Raises NotInitializedError before init(); ValueError for a root or a rank outside of the set, and for the name of an
    operation that is not complete; TypeError for a dtype that cannot be sent; HorovodInternalError on every rank
    if shapes, dtypes or roots differ between ranks, or a rank has left or joined.
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
    """Send each rank its rows of the tensor, and return the received rows in rank order.

    tensor: shape (n, ...); the other dimensions and the dtype must be the same on all ranks. dtype: as for allgather().
    splits: the number of rows for each rank, shape (size,), a list or tensor of integers. None: equal parts; n must
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
    """Reduce a tensor over all ranks; each rank gets its rows of the result, in a new tensor.

    tensor: shape (n, ...); shape and dtype the same on all ranks; any dtype that allreduce() takes. Rank i gets
    n // size rows, and one more if i < n % size.
    op: Average or Sum. The other arguments: as for allreduce().
    Differentiable: the gradients of all rows are gathered.

    Raises NotInitializedError before init(); ValueError on a rank outside of the set, for a scalar, and for the name of
    an operation that is not complete; NotImplementedError for another op; TypeError for a dtype that cannot be reduced
    with this op; HorovodInternalError on every rank if shapes, dtypes, ops or factors differ between ranks, or a rank
    has left or joined.
    """
    if compression is Compression.none:
        return _reducescatter(tensor, name, op, process_set, prescale_factor, postscale_factor)
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
            collectives.find_group(process_set, "grouped_reducescatter()").size,
            lambda tensors, op, factors: _grouped_reducescatter(tensors, name, op, process_set, *factors),
        )
    )


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start to reduce a sparse tensor over all ranks; returns a function that waits and returns the result, coalesced.

    tensor: COO format, with the same shape and dtype on all ranks and any number of entries.
    name: of the operation, the same on all ranks. op: Average or Sum, else ValueError.
    Both calls raise the errors of allgather(), which carries out the reduction.
    """
    if op not in (Average, Sum):
        raise ValueError(
            f"sparse_allreduce_async(): op is {op!r}; sparse tensors can be reduced with hvd.Average or hvd.Sum only."
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


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set has called barrier().

    Raises NotInitializedError before init(), ValueError on a rank outside of the set, HorovodInternalError if a rank
    has left.
    """
    named.do(collectives.find_group(process_set, "barrier()"), "barrier", None, (), ())


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
