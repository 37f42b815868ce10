"""The backend of torch.distributed for a type of device, made without a group of the script.

The arguments of the constructors, and what each object does when it connects, ends or fails, were read in the sources
of torch 2.4 to 2.13. ProcessGroupGloo and a plug-in have run; the others have not.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvdkit.errors import TransportError
from hvdkit.torch.device.variables import nccl_variables, set_unless_given

#: Of connections and calls. hvdkit ends waits for lost ranks by itself, so no timeout of a backend may end them before.
FOR_EVER = timedelta(days=3650)
_GLOO_THREADS = 2


@dataclass(frozen=True)
class Backend:
    """A backend of torch.distributed. kind: its name. calls: the object, whose methods begin operations."""

    kind: str
    calls: Any


def choose_backend(device_type: str) -> str:
    """Return the name of the backend that torch.distributed has for a type of device.

    "gloo" is for tensors of the CPU only: hvdkit's own transports move host memory faster.
    Raises TransportError, with the cure, if there is none.
    """
    if not dist.is_available():
        raise TransportError(
            "this torch was built without torch.distributed; install a wheel from pytorch.org or PyPI."
        )
    name = dist.Backend.default_device_backend_map.get(device_type, "")
    built = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "xccl": getattr(dist, "is_xccl_available", lambda: False),
    }
    if not name or (name == "gloo" and device_type != "cpu"):
        raise TransportError(
            f"torch.distributed has no backend for tensors on {device_type!r}; import the package that registers one."
        )
    if name in built and not built[name]():
        raise TransportError(
            f"this torch has no {name.upper()} for tensors on {device_type!r}; install a build of torch with it."
        )
    if name not in built and name.upper() not in dist.Backend._plugins:
        raise TransportError(
            f"the backend {name!r} for tensors on {device_type!r} is not registered with torch.distributed"
        )
    return name


def make_backend(name: str, store: Any, rank: int, size: int, device: torch.device, *, one_host: bool) -> Any:
    """Make the bare backend object, see calls.connect_ranks() for the rest; collective among the ranks of the store.

    name: of choose_backend().
    store: of torch.
    rank: this process's number in the group.
    size: number of ranks.
    device: of this rank's tensors.
    one_host: all ranks are on this host.
    Raises RuntimeError, as the backend does.
    """
    if name == "gloo":
        options: Any = getattr(dist.ProcessGroupGloo, "_Options")()  # noqa: B009  private
        options._devices = [_gloo_device(one_host)]
        options._threads, options._timeout = _GLOO_THREADS, FOR_EVER
        return dist.ProcessGroupGloo(store, rank, size, options)
    if name in ("nccl", "xccl"):
        kind = getattr(dist, f"ProcessGroup{name.upper()}")
        if "Options" not in vars(kind):  # XCCL in torch 2.7 and 2.8 takes none; the name is the base class's
            return kind(store, rank, size)
        options = kind.Options()
        options._timeout, options.is_high_priority_stream = FOR_EVER, True
        with set_unless_given(nccl_variables()):
            backend = kind(store, rank, size, options)
        backend.eager_connect_single_device(device)
        return backend
    creator, extended = dist.Backend._plugins[name.upper()][:2]
    if not extended:
        return creator(store, rank, size, FOR_EVER)
    options = getattr(dist.distributed_c10d, "_DistributedBackendOptions")()  # noqa: B009  private, and not exported
    options.store, options.group_rank, options.group_size, options.timeout = store, rank, size, FOR_EVER
    options.group_id, options.global_ranks_in_group = "hvdkit", list(range(size))
    return creator(options, None)


def has_failed(backend: Backend) -> bool:
    """Return whether NCCL has reported an error, for example of the network; does not query the device.

    Its watchdog thread sees errors within 0.1 s. False on torch without ProcessGroupNCCL.get_error(), up to 2.6, and
    for other backends: work.wait() raises their errors.
    """
    get_error = getattr(backend.calls, "get_error", None) if backend.kind == "nccl" else None
    return get_error is not None and get_error().name != "SUCCESS"


def end_operations(backend: Any) -> None:
    """End the operations in progress, as far as the backend can; it may wait for the whole device."""
    abort = getattr(backend, "abort", None) or getattr(backend, "_shutdown", None)  # the latter up to torch 2.5
    if abort is not None:
        with contextlib.suppress(RuntimeError):
            abort()


def shut_down(backend: Any) -> None:
    """Free the connections after the last operation; it may wait for the other ranks."""
    shutdown = getattr(backend, "shutdown", None) or getattr(backend, "_shutdown", None)
    if shutdown is not None:
        shutdown()


@functools.cache
def _gloo_device(one_host: bool) -> Any:
    gloo = dist.ProcessGroupGloo
    return gloo.create_device(hostname="127.0.0.1") if one_host else gloo.create_default_device()
