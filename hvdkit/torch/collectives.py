"""What each collective asks of the ranks, what becomes of its results, and what its gradient is. Starts nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import itemgetter
from typing import Any, TypeVar

import torch

from hvdkit.engine.compression import Factors
from hvdkit.engine.groups import Group, ProcessSet
from hvdkit.engine.named.execution import split_rows
from hvdkit.engine.named.operation import Announcement, Operation
from hvdkit.engine.named.submit import check_process_set, check_splits, reduce_options, root_options, scatter_options
from hvdkit.engine.reduce_op import Average, ReduceOp, Sum, choose_op
from hvdkit.torch.collective import Collective, Rows, Tensors
from hvdkit.torch.tensors import as_tensor, name_of_dtype
from hvdkit.transport.buffer import Buffer

Result = TypeVar("Result")
#: dtype and shape of each tensor.
Described = tuple[tuple[torch.dtype, tuple[int, ...]], ...]

_MOST_ANNOUNCEMENTS = 4096  # that are kept: the same object again is compared sooner, and is made already


def check_group(tensors: Any, call: str) -> list[torch.Tensor]:
    """The tensors of a group. Raises ValueError if there are none, TypeError for something else."""
    group = list(tensors)
    if not group:
        raise ValueError(f"{call} was called with no tensors; give it at least one.")
    for tensor in group:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{call} takes torch tensors, not {type(tensor).__name__}.")
    return group


def find_group(process_set: Any, call: str) -> Group:
    """As process_set.group(call). Raises TypeError for anything but a ProcessSet, such as a list of ranks."""
    if not isinstance(process_set, ProcessSet):
        check_process_set(process_set, call)
    group: Group = process_set.group(call)
    return group


@functools.lru_cache(_MOST_ANNOUNCEMENTS)
def _announce(kind: str, described: Described, options: tuple[tuple[str, str], ...] = ()) -> Announcement:
    return Announcement(kind, tuple((name_of_dtype(dtype), tuple(shape)) for dtype, shape in described), options)


@functools.lru_cache(_MOST_ANNOUNCEMENTS)
def _announce_reduction(
    kind: str,
    described: Described,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    call: str,
) -> Announcement:
    dtypes = [name_of_dtype(dtype) for dtype, _ in described]
    write = scatter_options if kind == "reducescatter" else reduce_options
    options = write(dtypes, op, prescale_factor, postscale_factor, call)
    return _announce(kind, described, options)


def _in_rows(tensors: Tensors) -> Described:
    """Shapes for what gathers along the first dimension: a scalar's is (1,)."""
    return tuple([(tensor.dtype, tensor.shape or (1,)) for tensor in tensors])


def _shape(result: Buffer, shape: tuple[int, ...], tensor: torch.Tensor) -> torch.Tensor:
    """The numbers in this shape, on the device of the tensor."""
    return as_tensor(result).view(shape).to(tensor.device)


def allreduce(
    tensors: Tensors,
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    factors: Factors,
    process_set: ProcessSet,
    call: str,
    pack: Callable[[Any], Result],
) -> Collective[Result]:
    """Results: op(x of all ranks). Gradient, for a sum or an average: dx = op(dy of all ranks)."""
    described = tuple([(tensor.dtype, tensor.shape) for tensor in tensors])
    chosen = op if average is None and isinstance(op, ReduceOp) else choose_op(average, op, call)
    announcement = _announce_reduction("allreduce", described, chosen, *factors, call)

    def gradient(_: Rows, grads: Tensors) -> Tensors:
        if chosen not in (Average, Sum):
            raise NotImplementedError(
                f"{call} with op={chosen} has no gradient. Use op=hvd.Sum or hvd.Average, or detach the tensor."
            )
        return allreduce(grads, None, None, chosen, factors, process_set, call, list).do_differentiably()

    return Collective(find_group(process_set, call), announcement, name, tensors, pack, gradient)


def _mean(tensors: Tensors, process_set: ProcessSet) -> Tensors:
    """Averages over all ranks."""
    return allreduce(tensors, None, None, Average, (1.0, 1.0), process_set, "allreduce()", list).do_differentiably()


def allgather(
    tensors: Tensors, name: str | None, process_set: ProcessSet, call: str, pack: Callable[[Any], Result]
) -> Collective[Result]:
    """Results: the x of all ranks, one after the other. Gradient: this rank's rows of the average of dy."""
    group, shapes = find_group(process_set, call), [tensor.shape for tensor in tensors]

    def collect(operation: Operation) -> Tensors:
        results = []
        for at, (result, tensor) in enumerate(zip(operation.results, tensors, strict=True)):
            shape = (sum(rows[at] for rows in operation.rows), *tensor.shape[1:])
            results.append(_shape(result, shape, tensor))
        return results

    def gradient(rows: Rows, grads: Tensors) -> Tensors:
        rank, own = group.transport.rank, []
        for at, (mean, shape) in enumerate(zip(_mean(grads, process_set), shapes, strict=True)):
            counts = [each[at] for each in rows]
            own.append(mean.narrow(0, sum(counts[:rank]), counts[rank]).view(shape))
        return own

    announcement = _announce("allgather", _in_rows(tensors))
    return Collective(group, announcement, name, tensors, pack, gradient, collect, overwrites=False)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> Collective[torch.Tensor]:
    """Result: x of the root. Gradient: on the root the average of dy over all ranks, elsewhere zero."""
    group = find_group(process_set, "broadcast()")
    described = ((tensor.dtype, tensor.shape),)
    announcement = _announce("broadcast", described, root_options(process_set, root_rank, "broadcast()"))

    def gradient(_: Rows, grads: Tensors) -> Tensors:
        means = _mean(grads, process_set)
        return means if group.this_rank == root_rank else [torch.zeros_like(means[0])]

    return Collective(group, announcement, name, [tensor], itemgetter(0), gradient)


def alltoall(
    tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
) -> Collective[tuple[torch.Tensor, torch.Tensor]]:
    """Results: the rows that came, and how many from each rank. Gradient: that of each row, where it came from."""
    call = "alltoall()"
    group, shape = find_group(process_set, call), tensor.shape
    rank, size = group.transport.rank, group.transport.size
    counts = check_splits(shape[0] if shape else 1, _as_list(splits, size, call), size, call)

    def collect(operation: Operation) -> Tensors:
        received = [rows[rank] for rows in operation.rows]
        fits = max(received) < 2**31  # else of int64, which Horovod does not have here
        rows = _shape(operation.results[0], (sum(received), *shape[1:]), tensor)
        return [rows, torch.tensor(received, dtype=torch.int32 if fits else torch.int64)]

    def gradient(rows: Rows, grads: Tensors) -> Tensors:
        received = [each[rank] for each in rows]
        back, _ = alltoall(grads[0], received, None, process_set).do_differentiably()
        unsent = (shape[0] if shape else 1) - back.shape[0]  # rows that went nowhere
        if unsent:
            back = torch.cat([back, back.new_zeros(unsent, *back.shape[1:])])
        return [back.view(shape)]

    announcement = Announcement("alltoall", _announce("alltoall", _in_rows([tensor])).tensors, (), counts)
    return Collective(group, announcement, name, [tensor], tuple, gradient, collect, overwrites=False)


def _as_list(splits: Any, size: int, call: str) -> Any:
    """Splits as a list of integers, or None for equal parts, as an empty tensor says too."""
    if not isinstance(splits, torch.Tensor):
        return splits
    if splits.numel() and (splits.is_floating_point() or splits.dim() != 1):
        raise ValueError(
            f"{call}: splits must hold one integer for each of the {size} ranks; got a tensor of {splits.dtype} and "
            f"shape {list(splits.shape)}."
        )
    return splits.tolist() or None


def reducescatter(
    tensors: Tensors,
    name: str | None,
    op: ReduceOp,
    factors: Factors,
    process_set: ProcessSet,
    call: str,
    pack: Callable[[Any], Result],
) -> Collective[Result]:
    """Results: this rank's rows of op(x of all ranks). Gradient: dx = all ranks' dy, times size for a sum."""
    group = find_group(process_set, call)
    rank, size = group.transport.rank, group.transport.size
    described = tuple([(tensor.dtype, tensor.shape) for tensor in tensors])
    chosen = choose_op(None, op, call)
    announcement = _announce_reduction("reducescatter", described, chosen, *factors, call)
    if not all(tensor.dim() for tensor in tensors):
        raise ValueError(f"{call}: a scalar has no rows to scatter; give a tensor of at least one dimension.")

    def collect(operation: Operation) -> Tensors:
        return [
            _shape(result, (split_rows(tensor.shape[0], size)[rank], *tensor.shape[1:]), tensor)
            for tensor, result in zip(tensors, operation.results, strict=True)
        ]

    def gradient(_: Rows, grads: Tensors) -> Tensors:
        gathered = allgather(grads, None, process_set, "allgather()", list).do_differentiably()
        factor = factors[0] * factors[1] * (1 if chosen is Average else size)
        return [grad * factor for grad in gathered]

    return Collective(group, announcement, name, tensors, pack, gradient, collect)
