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

from hvdkit.errors import ConfigError, HvdkitError, TransportError
from hvdkit.log import logger
from hvdkit.transport.api import Transport
from hvdkit.transport.c_library import CLibrary
from hvdkit.transport.cuda import CudaDriver, open_device
from hvdkit.transport.gpu_driver import Driver, GpuDevice
from hvdkit.transport.hip import HipDriver
from hvdkit.transport.nccl.group import DeviceGroup
from hvdkit.transport.nccl.library import NCCL, RCCL, Library, Version, load_nccl
from hvdkit.transport.small_collectives import allgather_object

#: What a framework is built for -> the driver and the library of collectives of its GPUs.
PLATFORMS: dict[str, tuple[type[Driver], CLibrary]] = {"cuda": (CudaDriver, NCCL), "rocm": (HipDriver, RCCL)}


@dataclass(frozen=True)
class DeviceSettings:
    """The settings for reductions of GPU memory.

    wish: "nccl", or RCCL on ROCm; "auto" for it where possible; "host" for reductions in the host's memory.
    library: path of libnccl or librccl; "" to find it.
    shares: the ranks were started to share GPUs.
    platform: what the framework is built for, in PLATFORMS.
    """

    wish: str = "auto"
    library: str = ""
    shares: bool = False
    platform: str = "cuda"


@dataclass(frozen=True)
class Finding:
    """The GPU and NCCL of a rank; from all ranks' findings they conclude whether they reduce in device memory.

    problem: why the rank cannot use NCCL; "" if it can.
    host: name of its host.
    gpu: UUID of its GPU; "" if its tensors are not on one GPU.
    index: number of the GPU among those that the process sees.
    version: of NCCL or RCCL.
    shares: the rank may share its GPU.
    library: "NCCL" or "RCCL".
    """

    problem: str = ""
    host: str = ""
    gpu: str = ""
    index: int = 0
    version: Version = (0, 0, 0)
    shares: bool = False
    library: str = NCCL.name


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
    Raises TransportError on all ranks, with the cause, if NCCL was requested and cannot be used, and ConfigError for a
    wish that is not in DeviceSettings.
    """
    _check_wish(settings.wish)
    if settings.wish == "host":
        return None
    device, library, finding = _look(index, host, settings)
    findings: list[Finding] = allgather_object(transport, finding)
    if not any(each.gpu or each.problem for each in findings):
        return None
    problem = find_problem(findings)
    if problem and settings.wish == "nccl":
        name = PLATFORMS[settings.platform][1].name
        raise TransportError(f"device_transport=nccl: {name} cannot be used. The cause is {problem}")
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


def _check_wish(wish: str) -> None:
    if wish == "torch":
        raise ConfigError(
            "device_transport=torch: process groups of torch.distributed reduce tensors of PyTorch only, and these are "
            "of TensorFlow or JAX. Set HVDKIT_DEVICE_TRANSPORT to nccl, host or auto."
        )
    if wish not in ("auto", "nccl", "host"):
        raise ConfigError(f"device_transport={wish!r} is unknown. Set HVDKIT_DEVICE_TRANSPORT to nccl, host or auto.")


def _look(index: int | None, host: str, settings: DeviceSettings) -> tuple[GpuDevice | None, Library | None, Finding]:
    if index is None:
        return None, None, Finding("", host)
    driver, kind = PLATFORMS[settings.platform]
    try:
        device, library = open_device(index, driver), load_nccl(settings.library, kind)
    except HvdkitError as error:
        return None, None, Finding(str(error), host)
    finding = Finding("", host, device.uuid, device.index, library.version, settings.shares, library.name)
    return device, library, finding


def find_problem(findings: Sequence[Finding]) -> str:
    """Describe why these ranks cannot use NCCL together, and the cure; "" if they can. The same on all ranks."""
    for rank, finding in enumerate(findings):
        if finding.problem:
            return f"rank {rank} on {finding.host}: {finding.problem}"
    for rank, finding in enumerate(findings):
        other = findings[0]
        if not finding.gpu:
            return f"rank {rank} on {finding.host}: its tensors are not all on one GPU."
        if finding.library != other.library or finding.version[:2] != other.version[:2]:
            names = [f"{each.library} {'.'.join(map(str, each.version))}" for each in (other, finding)]
            return (
                f"rank 0 on {other.host} has {names[0]} and rank {rank} on {finding.host} has {names[1]}. "
                f"Install the same version of {other.library} on all hosts."
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
    """Return the version of NCCL or RCCL in this process's open device groups; None without a group."""
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
            driver = group.device.driver
            _thread = threading.Thread(target=_look_after_groups, args=(driver,), name="hvdkit-nccl", daemon=True)
            _thread.start()


def _look_after_groups(driver: Driver) -> None:
    with contextlib.suppress(HvdkitError):
        driver.allow_captures()
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
