"""The process groups of this process: one for a transport and its ranks' devices, made by all ranks at the first use.

A thread checks the groups with operations in progress, because the host does not wait for these operations.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hvdkit.config import Config
from hvdkit.errors import HvdkitError, TransportError
from hvdkit.log import logger
from hvdkit.torch.device.accelerator import Accelerator, built_for, identify
from hvdkit.torch.device.backend import choose_backend
from hvdkit.torch.device.group import TorchGroup, keep_for_ever
from hvdkit.transport.api import Transport
from hvdkit.transport.device_choice import Finding, find_problem
from hvdkit.transport.group_watch import GroupWatch
from hvdkit.transport.small_collectives import allgather_object


@dataclass(frozen=True)
class DeviceSettings:
    """The settings for reductions of device memory.

    wish: "torch" for torch's process groups, also on the CPU; "nccl" for those of NCCL; "auto" for those of an
    accelerator where possible; "host" for reductions in the host's memory.
    shares: the ranks were started to share GPUs.
    """

    wish: str = "auto"
    shares: bool = False


def device_settings(config: Config) -> DeviceSettings:
    """Return the user's configuration for reductions in device memory."""
    return DeviceSettings(config.device_transport, config.share_gpus)


def may_open(config: Config) -> bool:
    """Return whether the ranks may have tensors for a process group; equal on all ranks of a job."""
    return config.device_transport == "torch" or (config.device_transport != "host" and bool(built_for()))


_TIMEOUT_S = 300.0  # to connect: the ranks of a large job load their libraries from one file system
#: Devices of a group's ranks, and name of its owner.
_Name = tuple[tuple[str, ...], str]
#: All ranks of a transport have the same groups of it.
_groups: dict[tuple[Transport, _Name], TorchGroup] = {}
_watch: GroupWatch[TorchGroup] = GroupWatch("hvdkit-torch-groups")


def open_group(
    transport: Transport, device: torch.device | None, settings: DeviceSettings, name: str = ""
) -> TorchGroup | None:
    """Return the process group of a transport's ranks, or None for the host's memory; collective.

    The first call with these devices and this name makes it, or takes one that no owner uses any more on any rank: a
    script may make many optimizers in turn, and a group keeps threads, sockets and device memory.
    transport: of the ranks, in host memory.
    device: of this rank's tensors; None if they are not on one device.
    settings: equal on all ranks.
    name: the owner of the operations; "" for those of all owners without a name.
    Raises TransportError on all ranks, with the cause, if a process group was requested and cannot be used.
    """
    if settings.wish == "host":
        return None
    finding = _look(device, settings)
    if _groups:
        gc.collect()  # an owner that is unreachable, but not collected on some rank, would keep its group on all
    gathered: list[tuple[Finding, dict[_Name, int]]] = allgather_object(transport, (finding, _unused(transport)))
    findings = [each for each, _ in gathered]
    if not any(each.device or each.problem for each in findings):
        return None
    problem = find_problem(findings) or _check_wish(findings, settings.wish)
    if problem and settings.wish != "auto":
        raise TransportError(
            f"device_transport={settings.wish}: a process group of torch cannot be used. The cause is {problem}"
        )
    if problem:
        if transport.rank == 0:
            logger.warning("Tensors of GPUs go through the host's memory. The cause is %s", problem)
        return None
    assert device is not None
    # The key has all ranks' devices, so that all ranks find or all make a group, even if one rank changes its device.
    devices = tuple(each.device for each in findings)
    key = (transport, (devices, name))
    unused = [each for each in _unused_by_all([each for _, each in gathered]) if each[0] == devices]
    if key not in _groups and name and unused:
        _groups[key] = _groups.pop((transport, unused[0]))
        _groups[key].name = name
    if key not in _groups:
        where = f"rank {transport.rank} on {finding.host}, {finding.name}"
        one_host = len({each.host for each in findings}) == 1
        _groups[key] = TorchGroup(
            transport,
            Accelerator(device),
            finding.library.lower(),
            where,
            name or "the common process group",
            one_host=one_host,
            timeout_s=_TIMEOUT_S,
        )
        _watch.add(_groups[key])
    return _groups[key]


def _unused(transport: Transport) -> dict[_Name, int]:
    """Return the groups of a transport that no owner uses any more on this rank, with their numbers of operations."""
    return {name: group.runs for (of, name), group in _groups.items() if of is transport and group.unused}


def _unused_by_all(ranks: Sequence[dict[_Name, int]]) -> list[_Name]:
    """Return what is in the results of _unused() of all ranks, after the same operations, in one order."""
    first, *others = ranks
    return sorted(name for name, runs in first.items() if all(other.get(name) == runs for other in others))


def _look(device: torch.device | None, settings: DeviceSettings) -> Finding:
    host = socket.gethostname()
    if device is None or (device.type == "cpu" and settings.wish == "auto"):
        return Finding("", host)
    try:
        backend = choose_backend(device.type)
    except HvdkitError as error:
        return Finding(str(error), host)
    name = "CPU" if device.type == "cpu" else f"GPU {device.index}"
    return Finding("", host, identify(device), name, backend.upper(), _version(backend), settings.shares)


def _check_wish(findings: Sequence[Finding], wish: str) -> str:
    """Describe why the ranks cannot have the requested library; "" if they can."""
    library = findings[0].library
    return f"that the tensors are on devices for {library}." if wish == "nccl" and library != "NCCL" else ""


def _version(backend: str) -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version()[:3]) if backend == "nccl" else ()  # a fourth is a suffix


def opened_device() -> torch.device | None:
    """Return the device of this process's open groups; None if there is no group, or several devices."""
    devices = {group.accelerator.device for group in tuple(_groups.values())}
    return devices.pop() if len(devices) == 1 else None


def opened_version() -> tuple[int, int, int] | None:
    """Return the version of NCCL if this process has an open group of it, else None."""
    if any(group.kind == "nccl" for group in tuple(_groups.values())):
        major, minor, patch = _version("nccl")
        return major, minor, patch
    return None


def wait_for_groups(timeout_s: float = math.inf) -> None:
    """Wait for all operations of the groups, and raise their errors; not collective."""
    for group in tuple(_groups.values()):  # an engine may open one meanwhile
        group.wait_for_stream(timeout_s)


def close_groups() -> None:
    """Close all groups; collective, unless ranks are lost. Called when the process leaves the world."""
    for group in tuple(_groups.values()):
        group.close()
    _groups.clear()


def _forget() -> None:
    """Keep the parent's backends in a forked child: their destructors wait for threads that only the parent has."""
    for group in tuple(_groups.values()):
        keep_for_ever(group.backend.calls)
    _groups.clear()


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _end() -> None:
    """Free the groups before Python ends: a thread of Gloo that uses Python later kills the process by SIGABRT."""
    for group in tuple(_groups.values()):
        with contextlib.suppress(Exception):
            group.leave()
