"""From tensors to named operations, and from those to tensors: what all collectives have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from hvdkit.engine.groups import Group, ProcessSet
from hvdkit.engine.named import submit as named
from hvdkit.engine.named.execution import split_rows
from hvdkit.engine.named.operation import Operation
from hvdkit.engine.named.submit import Options, check_splits, find_group, reduce_options, root_options
from hvdkit.engine.reduce_op import ReduceOp
from hvdkit.torch.handles import Handle, make_handle
from hvdkit.torch.tensors import TensorBuffer, as_buffer, as_tensor, dtype_name
from hvdkit.transport.buffer import Buffer

Tensors = Sequence[torch.Tensor]
Finish = Callable[[Operation], Any]
Result = TypeVar("Result")


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's shape; a scalar's is (1,) for what gathers along the first dimension."""
    return tuple(tensor.shape) or (1,)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor in contiguous host memory."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own memory where that is contiguous and the host's, else a copy of it there."""
    if not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_conj() or tensor.is_neg():
        return to_host(tensor)
    return tensor.detach() if tensor.requires_grad else tensor


def _copied(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of the tensor, where the engine takes it."""
    if group.engine.takes_tensors:
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    return to_host(tensor)


def _given(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own memory where that is contiguous and the engine takes it, else a copy."""
    if group.engine.takes_tensors:
        return tensor.detach().contiguous().resolve_conj().resolve_neg()
    return own_memory(tensor)


def check_group(tensors: Any, call: str) -> list[torch.Tensor]:
    """The tensors of a group. Raises ValueError if there are none, TypeError for something else."""
    made = list(tensors)
    if not made:
        raise ValueError(f"{call} was called with no tensors; give it at least one.")
    for tensor in made:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{call} takes torch tensors, not {type(tensor).__name__}.")
    return made


def begin(
    group: Group,
    kind: str,
    name: str | None,
    hosts: Tensors,
    finish: Finish,
    *,
    options: Options = (),
    splits: tuple[int, ...] = (),
) -> Handle:
    """Begin an operation; returns its handle. finish: makes of it what the caller gets."""
    buffers = _buffers(group, hosts)
    return make_handle(group.engine, named.begin(group, kind, name, _describe(hosts), buffers, options, splits), finish)


def do(group: Group, kind: str, name: str | None, hosts: Tensors, finish: Finish, *, options: Options = ()) -> Any:
    """Do an operation now; returns what `finish` makes of it."""
    buffers = _buffers(group, hosts)
    return finish(named.do(group, kind, name, _describe(hosts), buffers, options))


def _buffers(group: Group, hosts: Tensors) -> list[Buffer]:
    if group.engine.takes_tensors:
        return [TensorBuffer(host.view(-1), dtype_name(host)) for host in hosts]
    return [as_buffer(host) for host in hosts]


def _describe(hosts: Tensors) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple([(dtype_name(host), tuple(host.shape)) for host in hosts])


def run_allreduce(
    run: Callable[..., Result],
    tensors: list[torch.Tensor],
    name: str | None,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
    *,
    in_place: bool,
    call: str,
    single: bool,
) -> Result:
    """An allreduce of one tensor, or of a group. run: `begin` it, or `do` it."""
    group = find_group(process_set, call)
    options = reduce_options([dtype_name(tensor) for tensor in tensors], op, *factors, call)
    hosts = [_given(group, tensor) if in_place else _copied(group, tensor) for tensor in tensors]

    finish = functools.partial(_finish_allreduce, tensors, hosts, in_place, single)
    return run(group, "allreduce", name, hosts, finish, options=options)


def _finish_allreduce(tensors: Tensors, hosts: Tensors, in_place: bool, single: bool, _: Operation) -> Any:
    made = [_put(tensor, host, in_place) for tensor, host in zip(tensors, hosts, strict=True)]
    return made[0] if single else made


def _put(tensor: torch.Tensor, host: torch.Tensor, in_place: bool) -> torch.Tensor:
    """What the caller gets: the tensor itself, overwritten, or a new one on its device."""
    if not in_place:
        return host.to(tensor.device)
    if host.data_ptr() == tensor.data_ptr():
        torch.autograd.graph.increment_version(tensor)
    else:
        with torch.no_grad():
            tensor.copy_(host)
    return tensor


def run_broadcast(
    run: Callable[..., Result],
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    in_place: bool,
    call: str,
) -> Result:
    """A broadcast. run: `begin` it, or `do` it. root_rank: in the world."""
    group = find_group(process_set, call)
    options = root_options(process_set, root_rank)
    host = _given(group, tensor) if in_place else _copied(group, tensor)

    def finish(_: Operation) -> torch.Tensor:
        return _put(tensor, host, in_place)

    return run(group, "broadcast", name, [host], finish, options=options)


def start_allgather(
    tensors: list[torch.Tensor], name: str | None, process_set: ProcessSet, *, call: str, single: bool
) -> Handle:
    """Begin an allgather of one tensor, or of a group."""
    group = find_group(process_set, call)
    hosts = [_given(group, tensor).reshape(shape_of(tensor)) for tensor in tensors]

    def finish(operation: Operation) -> Any:
        made = [
            as_tensor(result).view(-1, *shape_of(tensor)[1:]) if result.count else _empty(tensor, operation, at)
            for at, (result, tensor) in enumerate(zip(operation.results, tensors, strict=True))
        ]
        made = [one.to(tensor.device) for one, tensor in zip(made, tensors, strict=True)]
        return made[0] if single else made

    return begin(group, "allgather", name, hosts, finish)


def _empty(tensor: torch.Tensor, operation: Operation, at: int) -> torch.Tensor:
    rows = sum(each[at] for each in operation.rows)
    return torch.empty(rows, *shape_of(tensor)[1:], dtype=tensor.dtype)


def start_alltoall(
    tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet, *, call: str
) -> Handle:
    """Begin an alltoall; the result is a pair of the received rows and how many came from each rank."""
    group = find_group(process_set, call)
    size = group.transport.size
    host = _given(group, tensor).reshape(shape_of(tensor))
    counts = check_splits(host.shape[0], _listed(splits, size, call), size, call)

    def finish(operation: Operation) -> Any:
        received = [each[group.transport.rank] for each in operation.rows]
        shape = (sum(received), *host.shape[1:])
        made = as_tensor(operation.results[0]).view(shape).to(tensor.device)
        fits = max(received) < 2**31  # else of int64, which Horovod does not have here
        return made, torch.tensor(received, dtype=torch.int32 if fits else torch.int64)

    return begin(group, "alltoall", name, [host], finish, splits=counts)


def _listed(splits: Any, size: int, call: str) -> Any:
    """Splits as a list of integers, or None for equal parts, as an empty tensor says too."""
    if not isinstance(splits, torch.Tensor):
        return splits
    if splits.numel() and (splits.is_floating_point() or splits.dim() != 1):
        raise ValueError(
            f"{call}: splits must be a list of {size} whole numbers, not {splits.dtype} {list(splits.shape)}."
        )
    return splits.tolist() or None


def start_reducescatter(
    tensors: list[torch.Tensor],
    name: str | None,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
    *,
    call: str,
    single: bool,
) -> Handle:
    """Begin a reducescatter of one tensor, or of a group."""
    group = find_group(process_set, call)
    options = reduce_options([dtype_name(tensor) for tensor in tensors], op, *factors, call)
    for tensor in tensors:
        if not tensor.dim():
            raise ValueError(f"{call}: a scalar has no rows to scatter; give a tensor of at least one dimension.")
    hosts = [_copied(group, tensor) for tensor in tensors]

    def finish(operation: Operation) -> Any:
        made = []
        for tensor, result in zip(tensors, operation.results, strict=True):
            width = max(1, tensor[:1].numel())
            rows = result.count // width if tensor[:1].numel() else _rows_of(tensor, group)
            made.append(as_tensor(result).view(rows, *tensor.shape[1:]).to(tensor.device))
        return made[0] if single else made

    return begin(group, "reducescatter", name, hosts, finish, options=options)


def _rows_of(tensor: torch.Tensor, group: Group) -> int:
    return split_rows(tensor.shape[0], group.transport.size)[group.transport.rank]


def do_barrier(process_set: ProcessSet) -> None:
    """Return when all ranks of the set are here."""
    do(find_group(process_set, "barrier()"), "barrier", None, (), lambda _: None)
