"""allreduce() and its forms, and the functions that the other collectives (ops.py) share with it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from hvdkit.engine.compression import Factors, reduce_compressed
from hvdkit.engine.groups import ProcessSet, global_process_set, group_of
from hvdkit.engine.named.operation import OperationRequest
from hvdkit.engine.named.submit import reduce_options, scatter_options
from hvdkit.engine.reduce_op import Average, ReduceOp, Sum, choose_op
from hvdkit.torch.collective import Collective, Result, Rows, Tensors, asynchronous, collective, in_place
from hvdkit.torch.compression import Compression, Compressor
from hvdkit.torch.refusals import check_numbers
from hvdkit.torch.tensors import name_of_dtype

Narrow = type[Compressor]
#: (dtype, shape) of each tensor.
Described = tuple[tuple[torch.dtype, tuple[int, ...]], ...]

_MOST_ANNOUNCEMENTS = 4096  # size of the cache: an identical object is compared sooner, and need not be made again

first: Callable[[Any], torch.Tensor] = itemgetter(0)


def check_group(tensors: Any, call: str) -> list[torch.Tensor]:
    """Return the tensors of a group as a list. Raises ValueError if it is empty, TypeError for another type."""
    group = list(tensors)
    if not group:
        raise ValueError(f"{call} was called with no tensors; give it at least one.")
    for tensor in group:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{call} takes torch tensors, not {type(tensor).__name__}.")
    return group


@functools.lru_cache(_MOST_ANNOUNCEMENTS)
def announce(kind: str, described: Described, options: tuple[tuple[str, str], ...] = ()) -> OperationRequest:
    """Make the announcement: the properties of an operation that must be equal on all ranks."""
    return OperationRequest(kind, tuple((name_of_dtype(dtype), tuple(shape)) for dtype, shape in described), options)


@functools.lru_cache(_MOST_ANNOUNCEMENTS)
def announce_reduction(
    kind: str,
    described: Described,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    call: str,
) -> OperationRequest:
    """Make the announcement of a reduction. Raises TypeError if the operation is not possible with a dtype.

    kind: of the operation.
    described: (dtype, shape) of each tensor.
    op: of the reduction.
    prescale_factor: multiplied before the reduction.
    postscale_factor: multiplied after it.
    call: name for errors.
    """
    dtypes = [name_of_dtype(dtype) for dtype, _ in described]
    write = scatter_options if kind == "reducescatter" else reduce_options
    options = write(dtypes, op, prescale_factor, postscale_factor, call)
    return announce(kind, described, options)


def make_allreduce(
    tensors: Tensors,
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    factors: Factors,
    process_set: ProcessSet,
    call: str,
    pack: Callable[[Any], Result],
) -> Collective[Result]:
    """Make an allreduce. Results: op(x of all ranks). Gradient, for Sum and Average: dx = op(dy of all ranks).

    tensors: the caller's.
    average: Horovod's older argument for `op`.
    name: of the operation; None to count the calls instead.
    op: of the reduction; None for Average, unless `average` is given.
    factors: before and after the reduction.
    process_set: the ranks that take part.
    call: name for errors.
    pack: makes the caller's result of the sequence of results.
    """
    described = tuple([(tensor.dtype, tensor.shape) for tensor in tensors])
    chosen = op if average is None and isinstance(op, ReduceOp) else choose_op(average, op, call)
    announcement = announce_reduction("allreduce", described, chosen, *factors, call)

    def gradient(_: Rows, grads: Tensors) -> Tensors:
        if chosen not in (Average, Sum):
            raise NotImplementedError(
                f"{call} with op={chosen} has no gradient. Use op=hvd.Sum or hvd.Average, or detach the tensor."
            )
        return make_allreduce(grads, None, None, chosen, factors, process_set, call, list).do_differentiably()

    return Collective(group_of(process_set, call), announcement, name, tensors, pack, gradient)


def mean(tensors: Tensors, process_set: ProcessSet) -> Tensors:
    """Average each tensor over all ranks, differentiably."""
    reduction = make_allreduce(tensors, None, None, Average, (1.0, 1.0), process_set, "allreduce()", list)
    return reduction.do_differentiably()


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
    return make_allreduce([tensor], average, name, op, factors, process_set, "allreduce()", first)


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
    group = check_group(tensors, call)
    return make_allreduce(group, average, name, op, factors, process_set, call, list)


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
    prescale_factor: the tensor is multiplied by it before the reduction.
    postscale_factor: the result is multiplied by it after the reduction.
    process_set: the ranks that take part.
    Differentiable for Average and Sum: the gradient is reduced in the same way.

    Raises NotInitializedError before init(); ValueError on a rank outside of the set, for the name of an operation that
    is not complete, and for both `average` and `op`; TypeError for a dtype that cannot be sent, or not with this op;
    HorovodInternalError on every rank if shapes, dtypes, ops or factors differ between ranks, or a rank has left.
    """
    if compression is Compression.none:
        return _allreduce(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    check_numbers([tensor], "allreduce")
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

    tensors: at least one, of any shapes and dtypes, the same list on all ranks.
    The other arguments, and what it raises: as for allreduce(); ValueError also for an empty list.
    """
    if compression is not Compression.none:
        check_numbers(tensors := list(tensors), "grouped_allreduce")
    return list(
        reduce_compressed(
            compression,
            list(tensors),
            choose_op(average, op, "grouped_allreduce()"),
            (prescale_factor, postscale_factor),
            group_of(process_set, "grouped_allreduce()").size,
            lambda tensors, op, factors: _grouped_allreduce(tensors, None, name, op, *factors, process_set),
        )
    )
