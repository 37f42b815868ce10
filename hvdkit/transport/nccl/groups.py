"""The device groups of this process: one for each transport and its ranks' GPUs, made by all ranks at the first use.

A thread checks the groups with operations in progress, because the host does not wait for these operations.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

from hvdkit.errors import ConfigError, HvdkitError, TransportError
from hvdkit.log import logger
from hvdkit.transport.api import Transport
from hvdkit.transport.c_library import CLibrary
from hvdkit.transport.cuda import CudaDriver, open_device
from hvdkit.transport.device_choice import Finding, find_problem
from hvdkit.transport.gpu_driver import Driver, GpuDevice
from hvdkit.transport.group_watch import GroupWatch
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
    sums: Config.device_sums; only "library" is supported.
    """

    wish: str = "auto"
    library: str = ""
    shares: bool = False
    platform: str = "cuda"
    sums: str = "library"


_TIMEOUT_S = 300.0  # to connect: the ranks of a large job load their libraries from one file system
#: The groups by transport, GPUs of its ranks, and name.
_groups: dict[tuple[Transport, tuple[str, ...], str], DeviceGroup] = {}

_watches: dict[type[Driver], GroupWatch[DeviceGroup]] = {}


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
    wish or sums that are not supported.
    """
    _check_wish(settings.wish)
    if settings.wish == "host":
        return None
    device, library, finding = _look(index, host, settings)
    findings: list[Finding] = allgather_object(transport, finding)
    if not any(each.device or each.problem for each in findings):
        return None
    if settings.sums != "library":
        raise ConfigError(
            f"device_sums={settings.sums} is for gradients of PyTorch, and these are of TensorFlow or JAX. "
            "Leave out HVDKIT_DEVICE_SUMS, or set HVDKIT_DEVICE_TRANSPORT=host, which adds in float32."
        )
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
    key = (transport, tuple(each.device for each in findings), name)
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
    name = f"GPU {device.index}"
    finding = Finding("", host, device.uuid, name, library.name, library.version, settings.shares)
    return device, library, finding


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
    driver = group.device.driver

    def prepare() -> None:
        with contextlib.suppress(HvdkitError):
            driver.allow_captures()

    _watches.setdefault(type(driver), GroupWatch("hvdkit-nccl", prepare)).add(group)
