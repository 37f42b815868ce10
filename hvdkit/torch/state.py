"""Broadcast of parameters, optimizer state and objects, so that all ranks start equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hvdkit.engine.groups import global_process_set
from hvdkit.engine.job_objects import broadcast_object
from hvdkit.engine.replicate import broadcast_state
from hvdkit.torch.collective import own_memory
from hvdkit.torch.tensors import as_buffer
from hvdkit.transport.api import Transport
from hvdkit.transport.small_collectives import broadcast_bytes, pack, unpack


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int = 0) -> None:
    """Overwrite tensors on all ranks with those of rank root_rank, in place.

    params: model.state_dict(), model.named_parameters() or model.parameters(), of any shape and dtype. Entries that are
    not tensors are ignored. Names, shapes and dtypes must be the same on all ranks.
    Raises ValueError for a root that does not exist, NotInitializedError before init(), HorovodInternalError on every
    rank, before anything is overwritten, if names, shapes or dtypes differ between ranks, or if a rank calls another
    operation instead, has joined or has left.
    """
    tensors = [(name, value) for name, value in _entries(params) if isinstance(value, torch.Tensor)]

    def broadcast(transport: Transport) -> None:
        for _name, tensor in tensors:
            _overwrite(transport, tensor, root_rank)

    described = [f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors]
    broadcast_state("broadcast_parameters", "tensors", described, broadcast, root_rank)


def _entries(params: Mapping[str, Any] | Iterable[Any]) -> list[tuple[str, Any]]:
    if isinstance(params, Mapping):
        return sorted(params.items())  # independent of the order of insertion
    return [each if isinstance(each, tuple) else (f"number {at}", each) for at, each in enumerate(params)]


def _overwrite(transport: Transport, tensor: torch.Tensor, root_rank: int) -> None:
    host = own_memory(tensor)
    transport.broadcast(as_buffer(host.view(-1).view(torch.uint8)), root_rank)  # as bytes: complex numbers occur too
    if host.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(host)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Send the optimizer state and options (learning rates and so on) of rank root_rank to all ranks.

    It works before and after the first step, also if only the root has state, because it has loaded a checkpoint.
    State tensors may have any shape and dtype; they are stored on the device of their parameter.
    model: accepted as in Horovod, and ignored.
    Raises ValueError for a root that does not exist, NotInitializedError before init(), HorovodInternalError on every
    rank if the parameter groups have different sizes, or if a rank calls another operation instead, has joined or has
    left.
    """

    is_root = global_process_set.group("broadcast_optimizer_state()").transport.rank == root_rank
    tensors: list[torch.Tensor] = []

    def take_out(tensor: torch.Tensor) -> _Placeholder:
        tensors.append(tensor.detach().cpu().contiguous())
        return _Placeholder(tuple(tensor.shape), tensor.dtype)

    def make_room(placeholder: _Placeholder) -> torch.Tensor:
        tensors.append(torch.empty(placeholder.shape, dtype=placeholder.dtype))
        return tensors[-1]

    read = getattr(optimizer, "_hvdkit_share_state", optimizer.state_dict)  # a sharded optimizer has it; not collective
    skeleton = pack(map_nested(read(), torch.Tensor, take_out)) if is_root else b""

    def broadcast(transport: Transport) -> Any:
        sent = broadcast_bytes(transport, skeleton, root_rank)
        state = None if is_root else map_nested(unpack(sent), _Placeholder, make_room)
        for tensor in tensors:
            _overwrite(transport, tensor, root_rank)
        return state

    described = [f"of {len(group['params'])} parameters" for group in optimizer.param_groups]
    cure = "Build the optimizer in the same way on every rank."
    state = broadcast_state("broadcast_optimizer_state", "parameter groups", described, broadcast, root_rank, cure=cure)
    if not is_root:
        getattr(optimizer, "_hvdkit_take_state", optimizer.load_state_dict)(state)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # as in Horovod, whose scripts read these gradients


def share_state(thing: Any) -> None:
    """Set a module, an optimizer, or another object with state_dict and load_state_dict to its state on rank 0.

    Collective; raises what broadcast_parameters and broadcast_optimizer_state do.
    """
    if isinstance(thing, torch.nn.Module):
        broadcast_parameters(thing.state_dict())
    elif isinstance(thing, torch.optim.Optimizer):
        broadcast_optimizer_state(thing)
    else:
        thing.load_state_dict(broadcast_object(thing.state_dict()))


@dataclass(frozen=True)
class _Placeholder:
    """Placeholder for a tensor that is sent separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def map_nested(value: Any, kind: type[Any], change: Callable[[Any], Any]) -> Any:
    """Copy nested dicts, lists and tuples with values of this type changed."""
    if isinstance(value, kind):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(map_nested(inner, kind, change) for inner in value)
    if isinstance(value, dict):
        other = copy.copy(value)  # a module's state has attributes too
        for key, inner in value.items():
            other[key] = map_nested(inner, kind, change)
        return other
    return copy.deepcopy(value)
