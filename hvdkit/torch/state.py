"""Starting equal: parameters, optimizer state and objects from one rank to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hvdkit.engine import objects
from hvdkit.engine.groups import global_process_set
from hvdkit.engine.job_objects import broadcast_object
from hvdkit.engine.named.collective_step import collective_step
from hvdkit.errors import HorovodInternalError
from hvdkit.torch.collective import own_memory
from hvdkit.torch.tensors import as_buffer
from hvdkit.transport.api import Transport
from hvdkit.transport.small_collectives import broadcast_bytes


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int = 0) -> None:
    """Overwrite tensors on all ranks with root's, in place.

    params: model.state_dict(), model.named_parameters() or model.parameters(), of any shape and dtype; entries that are
    no tensors are left alone. Names, shapes and dtypes are the same on all ranks, else HorovodInternalError on every
    rank, before anything is overwritten.
    Raises ValueError for a root that does not exist, NotInitializedError before init(), HorovodInternalError also if a
    rank calls something else in its place, has joined or has left.
    """
    group = global_process_set.group("broadcast_parameters()")
    tensors = [(name, value) for name, value in _entries(params) if isinstance(value, torch.Tensor)]
    _check_root(root_rank, group.transport.size)
    mine = [f"{name} {value.dtype} {list(value.shape)}" for name, value in tensors]

    def spread(transport: Transport, _: Sequence[int]) -> str:
        described = objects.allgather_object(transport, mine)
        for rank, other in enumerate(described):
            if other != described[root_rank]:
                return _explain(described[root_rank], other, root_rank, rank)
        for _name, tensor in tensors:
            _overwrite(transport, tensor, root_rank)
        return ""

    options = [("root rank", str(root_rank))]
    problem = collective_step(group.engine, "broadcast_parameters", spread, options=options)
    if problem:
        raise HorovodInternalError(problem)


def _entries(params: Mapping[str, Any] | Iterable[Any]) -> list[tuple[str, Any]]:
    if isinstance(params, Mapping):
        return sorted(params.items())  # whatever order it was made in
    return [each if isinstance(each, tuple) else (f"number {at}", each) for at, each in enumerate(params)]


def _explain(root: list[str], other: list[str], root_rank: int, rank: int) -> str:
    pairs = list(zip(root, other, strict=False))
    at = next((i for i, (one, two) in enumerate(pairs) if one != two), len(pairs))
    here = root[at] if at < len(root) else "nothing"
    there = other[at] if at < len(other) else "nothing"
    return (
        f"broadcast_parameters(): the ranks hold different tensors ({len(root)} on rank {root_rank}, {len(other)} on "
        f"rank {rank}). Number {at} is {here} on rank {root_rank} and {there} on rank {rank}. Build the model from the "
        f"same configuration on every rank."
    )


def _overwrite(transport: Transport, tensor: torch.Tensor, root_rank: int) -> None:
    host = own_memory(tensor)
    transport.broadcast(as_buffer(host.view(-1).view(torch.uint8)), root_rank)  # complex numbers have state too
    if host.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(host)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Give every rank root's optimizer state and options (learning rates and so on).

    Works before and after the first step, also where only root has state (it has loaded a checkpoint); a rank's
    tensors, of any shape and dtype, land on the device of the parameter that they belong to. Parameter groups have the
    same sizes on all ranks, else HorovodInternalError on every rank. model: as in Horovod; not needed.
    Raises ValueError for a root that does not exist, NotInitializedError before init(), HorovodInternalError also if a
    rank calls something else in its place, has joined or has left.
    """
    group = global_process_set.group("broadcast_optimizer_state()")
    _check_root(root_rank, group.transport.size)
    is_root = group.transport.rank == root_rank
    sizes = [len(one["params"]) for one in optimizer.param_groups]
    owned: list[torch.Tensor] = []
    skeleton = objects.pack(_take_out(optimizer.state_dict(), owned)) if is_root else b""

    def spread(transport: Transport, _: Sequence[int]) -> tuple[list[list[int]], Any, list[torch.Tensor]]:
        seen = objects.allgather_object(transport, sizes)
        if any(one != seen[root_rank] for one in seen):
            return seen, None, []
        shape = objects.unpack(broadcast_bytes(transport, skeleton, root_rank))
        if is_root:
            tensors = [tensor.detach().cpu().contiguous() for tensor in owned]
        else:
            tensors = [torch.empty(size, dtype=dtype) for size, dtype in _placeholders(shape)]
        for tensor in tensors:
            _overwrite(transport, tensor, root_rank)
        return seen, shape, tensors

    options = [("root rank", str(root_rank))]
    seen, shape, tensors = collective_step(group.engine, "broadcast_optimizer_state", spread, options=options)
    if shape is None:
        told = "; ".join(f"rank {rank}: {size}" for rank, size in enumerate(seen))
        raise HorovodInternalError(
            f"broadcast_optimizer_state(): the ranks' optimizers have different parameter groups (sizes {told}). "
            f"Build the optimizer in the same way on every rank."
        )
    if not is_root:
        optimizer.load_state_dict(_put_back(shape, iter(tensors)))
    for one in optimizer.param_groups:
        for parameter in one["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # Horovod's leave gradients, and scripts read them


def share_state(thing: Any) -> None:
    """Make a module, an optimizer, or anything else with state_dict and load_state_dict what it is on rank 0.

    Collective; raises what broadcast_parameters and broadcast_optimizer_state do.
    """
    if isinstance(thing, torch.nn.Module):
        broadcast_parameters(thing.state_dict())
    elif isinstance(thing, torch.optim.Optimizer):
        broadcast_optimizer_state(thing)
    else:
        thing.load_state_dict(broadcast_object(thing.state_dict()))


def _check_root(root_rank: int, size: int) -> None:
    if not 0 <= root_rank < size:
        raise ValueError(f"root_rank is {root_rank}; there are {size} ranks, from 0 to {size - 1}.")


class _Placeholder:
    """Stands for a tensor that is sent by itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _take_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A copy of nested dicts, lists and tuples with a placeholder for each tensor, which goes to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Placeholder(value)
    if isinstance(value, dict):
        return {key: _take_out(one, tensors) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_take_out(one, tensors) for one in value)
    return value


def _placeholders(value: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    if isinstance(value, _Placeholder):
        return [(value.shape, value.dtype)]
    if isinstance(value, dict):
        return [found for one in value.values() for found in _placeholders(one)]
    if isinstance(value, (list, tuple)):
        return [found for one in value for found in _placeholders(one)]
    return []


def _put_back(value: Any, tensors: Any) -> Any:
    if isinstance(value, _Placeholder):
        return next(tensors)
    if isinstance(value, dict):
        return {key: _put_back(one, tensors) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_put_back(one, tensors) for one in value)
    return value
