"""The device groups of this process: one for each transport and its ranks' GPUs, made by all ranks at the first use.

A thread checks the groups with operations in progress, because the host does not wait for these operations.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.errors import HvdkitError, TransportError
from hvdkit.log import logger
from hvdkit.transport.api import Transport
from hvdkit.transport.cuda import CudaDevice, allow_captures, open_device
from hvdkit.transport.nccl.group import DeviceGroup
from hvdkit.transport.nccl.library import Library, Version, load_nccl
from hvdkit.transport.small_collectives import allgather_object


@dataclass(frozen=True)
class DeviceSettings:
    """The settings for reductions of GPU memory.

    wish: "nccl"; "auto" for NCCL where possible; "host" for reductions in the host's memory. library: path of libnccl;
    "" to find it. shares: the ranks were started to share GPUs.
    """

    wish: str = "auto"
    library: str = ""
    shares: bool = False


@dataclass(frozen=True)
class Finding:
    """The GPU and NCCL of a rank; from all ranks' findings they conclude whether they reduce in device memory.

    problem: why the rank cannot use NCCL; "" if it can.
    host: name of its host.
    gpu: UUID of its GPU; "" if its tensors are not on one GPU.
    index: number of the GPU among those that the process sees.
    version: of NCCL.
    shares: the rank may share its GPU.
    """

    problem: str = ""
    host: str = ""
    gpu: str = ""
    index: int = 0
    version: Version = (0, 0, 0)
    shares: bool = False


_TIMEOUT_S = 300.0  # to connect: the ranks of a large job load their libraries from one file system
#: The groups by transport, GPUs of its ranks, and name.
_groups: dict[tuple[Transport, tuple[str, ...], str], DeviceGroup] = {}

_WATCH_S = 0.5
_watched: weakref.WeakSet[DeviceGroup] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def open_group(
    transport: Transport, index: int | None, host: str, settings: DeviceSettings, name: str = ""
) -> DeviceGroup | None:
    """Return the device group of a transport's ranks; collective. The first call with these GPUs makes it.

    transport: of the ranks, in host memory.
    index: number of this rank's GPU; None if its tensors are not on one GPU.
    host: name of this rank's host.
    settings: see DeviceSettings.
    name: the only user of the group, such as a plan. Each plan has its own group because operations of a group come in
    the same order on all ranks, and a joined rank begins a round of all plans.
    Returns None if the ranks' tensors go through the host's memory: because `settings` select it, because no rank's
    tensors are on a GPU, or because NCCL cannot be used, for which the first rank logs a warning.
    Raises TransportError on all ranks, with the cause, if NCCL was requested and cannot be used.
    """
    if settings.wish == "host":
        return None
    device, library, finding = _look(index, host, settings)
    findings: list[Finding] = allgather_object(transport, finding)
    if not any(each.gpu or each.problem for each in findings):
        return None
    problem = find_problem(findings)
    if problem and settings.wish == "nccl":
        raise TransportError(f"device_transport=nccl: NCCL cannot be used. The cause is {problem}")
    if problem:
        if transport.rank == 0:
            logger.warning("Tensors of GPUs go through the host's memory. The cause is %s", problem)
        return None
    assert device is not None and library is not None
    # The key has all ranks' GPUs, so that all ranks find or all make a group, even if one rank changes its GPU.
    key = (transport, tuple(each.gpu for each in findings), name)
    if key not in _groups:
        where = f"rank {transport.rank} on {host}, GPU {index}"
        _groups[key] = DeviceGroup(transport, device, library, where, _TIMEOUT_S, name or "the common communicator")
        watch(_groups[key])
    return _groups[key]


def _look(index: int | None, host: str, settings: DeviceSettings) -> tuple[CudaDevice | None, Library | None, Finding]:
    if index is None:
        return None, None, Finding("", host)
    try:
        device, library = open_device(index), load_nccl(settings.library)
    except HvdkitError as error:
        return None, None, Finding(str(error), host)
    return device, library, Finding("", host, device.uuid, device.index, library.version, settings.shares)


def find_problem(findings: Sequence[Finding]) -> str:
    """Describe why these ranks cannot use NCCL together, and the cure; "" if they can. The same on all ranks."""
    for rank, finding in enumerate(findings):
        if finding.problem:
            return f"rank {rank} on {finding.host}: {finding.problem}"
    for rank, finding in enumerate(findings):
        other = findings[0]
        if not finding.gpu:
            return f"rank {rank} on {finding.host}: its tensors are not all on one GPU."
        if finding.version[0] != other.version[0] or finding.version[1] != other.version[1]:
            dotted = [".".join(map(str, each.version)) for each in (other, finding)]
            return (
                f"rank 0 on {other.host} has NCCL {dotted[0]} and rank {rank} on {finding.host} has NCCL {dotted[1]}. "
                "Install the same version of NCCL on all hosts."
            )
    owners: dict[str, int] = {}
    for rank, finding in enumerate(findings):
        owner = owners.setdefault(finding.gpu, rank)
        if owner != rank and not finding.shares:
            return (
                f"ranks {owner} and {rank} on {finding.host} use the same GPU (number {finding.index} of those that "
                f"rank {rank} sees). Start one rank a GPU (hvdrun -np gpu), and select each rank's own with "
                "torch.cuda.set_device(hvd.local_rank()) or, on JAX, jax.config.update('jax_default_device', "
                "jax.local_devices()[hvd.local_rank()]). For tests on one GPU: hvdrun --share-gpus."
            )
    return ""


def opened_gpu() -> int | None:
    """Return the GPU of this process's open device groups; None if there is no GPU, or several."""
    indices = {group.device.index for group in tuple(_groups.values())}
    return indices.pop() if len(indices) == 1 else None


def opened_version() -> Version | None:
    """Return the version of NCCL in this process's open device groups; None without a group."""
    return next((group.version for group in tuple(_groups.values())), None)


def wait_for_groups(timeout_s: float = math.inf) -> None:
    """Wait for all operations of device groups, and raise their errors; not collective."""
    for group in tuple(_groups.values()):  # an engine may open one meanwhile
        group.wait_for_stream(timeout_s)


def close_groups() -> None:
    """Close all device groups; collective, unless ranks are lost. Called when the process leaves the world."""
    for group in tuple(_groups.values()):
        group.close()
    _groups.clear()


def watch(group: DeviceGroup) -> None:
    """Make a thread call the group's inspect() every half second, until the group is garbage-collected."""
    global _thread
    with _lock:
        _watched.add(group)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_look_after_groups, name="hvdkit-nccl", daemon=True)
            _thread.start()


def _look_after_groups() -> None:
    with contextlib.suppress(HvdkitError):
        allow_captures()
    pause = threading.Event()
    while not pause.wait(_WATCH_S):
        with _lock:
            groups = list(_watched)
        for group in groups:
            group.inspect(groups)


def _forget() -> None:
    """Reset the state after a fork, because the thread runs only in the parent."""
    global _thread, _lock
    _thread, _lock = None, threading.Lock()
    _watched.clear()


os.register_at_fork(after_in_child=_forget)
