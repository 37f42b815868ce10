"""The device groups of this process: one a transport and its ranks' GPUs, made by all of them at the first use.

A thread looks after those with work under way: the host does not wait for it, so nobody else does.
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
    """How memory of GPUs is reduced.

    wish: "nccl", "auto" for NCCL where that can be, "host" for never. library: path of libnccl, "" to find it. shares:
    were the ranks started to share GPUs?
    """

    wish: str = "auto"
    library: str = ""
    shares: bool = False


@dataclass(frozen=True)
class Finding:
    """What one rank says of its GPU and NCCL, for all to conclude whether they reduce in device memory.

    problem: why it cannot use NCCL; "" if it can. host: its name. gpu: its uuid; "" if its tensors are not on one GPU.
    index: of the GPU among those that the process sees. version: of NCCL. shares: may the rank share its GPU?
    """

    problem: str = ""
    host: str = ""
    gpu: str = ""
    index: int = 0
    version: Version = (0, 0, 0)
    shares: bool = False


_TIMEOUT_S = 300.0  # to connect: the ranks of a large job load their libraries from one file system
#: By transport, the GPUs of its ranks, and name.
_groups: dict[tuple[Transport, tuple[str, ...], str], DeviceGroup] = {}

_WATCH_S = 0.5
_watched: weakref.WeakSet[DeviceGroup] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def open_group(
    transport: Transport, index: int | None, host: str, settings: DeviceSettings, name: str = ""
) -> DeviceGroup | None:
    """The device group of a transport's ranks; collective. Made at the first call with these GPUs.

    index: of this rank's GPU; None on a rank whose tensors are not on one GPU. host: of this rank. name: of what has
    the group for itself, such as a plan: operations of a group come in one order on all ranks, and a joined rank begins
    a round of all plans.
    Returns None where the ranks' tensors go through the host's memory: as `settings` say, where no rank's are on a GPU,
    or, with a warning of the first rank, where NCCL cannot be used.
    Raises TransportError on all ranks if NCCL was asked for and cannot be used, with the cause.
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
    # All ranks' GPUs, so that all ranks find one, or all make one, where a single rank goes on to another GPU.
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
    """Why these ranks cannot use NCCL together, and what to do; "" if they can. The same on all ranks."""
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
    """The GPU of the device groups that this process has opened; None if there is none, or several."""
    indices = {group.device.index for group in tuple(_groups.values())}
    return indices.pop() if len(indices) == 1 else None


def opened_version() -> Version | None:
    """The version of NCCL in the device groups that this process has opened; None without one."""
    return next((group.version for group in tuple(_groups.values())), None)


def settle_groups(timeout_s: float = math.inf) -> None:
    """Wait for what device groups have under way, and raise what they have failed with; not collective."""
    for group in tuple(_groups.values()):  # an engine may open one meanwhile
        group.settle(timeout_s)


def close_groups() -> None:
    """Close all device groups; collective, unless ranks are lost. Called when the process leaves the world."""
    for group in tuple(_groups.values()):
        group.close()
    _groups.clear()


def watch(group: DeviceGroup) -> None:
    """Have the group's inspect() called every half second, until the group is collected."""
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
    """After a fork: the thread is the parent's."""
    global _thread, _lock
    _thread, _lock = None, threading.Lock()
    _watched.clear()


os.register_at_fork(after_in_child=_forget)
