"""The calls of a backend of torch.distributed, as data: made once for a bucket, and begun by TorchGroup.begin()."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hvdkit.torch.device.backend import FOR_EVER, Backend
from hvdkit.torch.device.reductions import as_real

_POLL_S = 0.001


class Call(NamedTuple):
    """A call that begins an operation. name: of the operation, for messages. method: of the backend."""

    name: str
    method: Callable[..., Any]
    arguments: tuple[Any, ...]


def _options(name: str, **values: object) -> Any:
    options = getattr(dist.distributed_c10d, name)()
    options.timeout = FOR_EVER
    if hasattr(options, "asyncOp"):  # False would mean: on the caller's stream, and no work is returned
        options.asyncOp = True
    for field, value in values.items():
        setattr(options, field, value)
    return options


def _op(name: str) -> Any:
    return getattr(dist.ReduceOp, name.upper())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def connect_ranks(backend: Backend, device: torch.device) -> None:
    """Connect the ranks of a backend by a first operation, for which the host waits; collective.

    XCCL and plug-ins read the store when they run their first operation; their eager_connect_single_device() does
    nothing. NCCL's connects, but only the first operation makes the connections that it uses.

    device: of this rank's tensors.
    Raises RuntimeError, as the backend does.
    """
    call = allreduce(backend, [torch.zeros(1, device=device)], "sum")
    work = call.method(*call.arguments)
    while not work.is_completed():
        time.sleep(_POLL_S)
    work.wait()


def allreduce(backend: Backend, tensors: Sequence[torch.Tensor], op: str) -> Call:
    """Reduce tensors of one dtype in place. op: "sum", "product", "min" or "max"."""
    memory = [as_real(tensor) for tensor in tensors]
    if len(memory) == 1:
        options = _options("AllreduceOptions", reduceOp=_op(op))
        return Call("an allreduce", backend.calls.allreduce, (memory, options))
    options = _options("AllreduceCoalescedOptions", reduceOp=_op(op))
    return Call("an allreduce", backend.calls.allreduce_coalesced, (memory, options))


def reduce_scatter(backend: Backend, own: torch.Tensor, whole: torch.Tensor, op: str) -> Call:
    """Reduce `whole` (n * size,); this rank's slice of it, `own` (n,), then is the result, and the rest undefined."""
    if backend.kind == "gloo":  # its own does not end before wait() is called, which then takes no limit of time
        return allreduce(backend, [whole], op)
    options = _options("ReduceScatterOptions", reduceOp=_op(op))
    return Call("a reduce-scatter", backend.calls._reduce_scatter_base, (as_real(own), as_real(whole), options))


def allgather(backend: Backend, own: torch.Tensor, whole: torch.Tensor) -> Call:
    """Concatenate all ranks' `own` (n,) in `whole` (n * size,)."""
    return Call(
        "an allgather", backend.calls._allgather_base, (_bytes(whole), _bytes(own), _options("AllgatherOptions"))
    )


def broadcast(backend: Backend, memory: torch.Tensor, root: int) -> Call:
    """Overwrite the memory with the root's."""
    return Call("a broadcast", backend.calls.broadcast, ([_bytes(memory)], _options("BroadcastOptions", rootRank=root)))


def all_to_all(
    backend: Backend, memory: torch.Tensor, result: torch.Tensor, sent: Sequence[int], received: Sequence[int]
) -> Call:
    """Send the i-th slice of `memory` to rank i, and receive the i-th slice of `result` from it.

    sent, received: number of elements for, and from, each rank.
    """
    size = memory.element_size()
    nbytes = [count * size for count in received], [count * size for count in sent]
    arguments = (_bytes(result), _bytes(memory), *nbytes, _options("AllToAllOptions"))
    return Call("an alltoall", backend.calls.alltoall_base, arguments)
