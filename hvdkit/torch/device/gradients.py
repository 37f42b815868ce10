"""Gradient buckets in device memory, which a process group of torch reduces during the backward pass."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence

from hvdkit.engine import runtime
from hvdkit.engine.allreduce import GradientReducer
from hvdkit.engine.groups import Group
from hvdkit.engine.observe.device_clock import DeviceClock
from hvdkit.engine.planned.on_device import OnDevice, Streams
from hvdkit.engine.planned.reducer import BucketReducer, Context, Statistics
from hvdkit.engine.planned.settings import device_plan_settings
from hvdkit.engine.request import ReduceOptions
from hvdkit.engine.runtime import Runtime
from hvdkit.engine.sharding.bucket_memory import BucketMemory
from hvdkit.engine.strategy import Parameters
from hvdkit.log import logger
from hvdkit.torch.device.accelerator import common_device
from hvdkit.torch.device.buckets import TorchBuckets
from hvdkit.torch.device.group import TorchGroup
from hvdkit.torch.device.groups import close_groups, device_settings, may_open, open_group, wait_for_groups
from hvdkit.torch.device.masks import DeviceMasks
from hvdkit.transport.buckets import BucketSpec


def open_device_reducer(
    current: Runtime,
    parameters: Parameters,
    group: Group,
    options: ReduceOptions,
    statistics: Statistics,
    *,
    static: bool,
) -> GradientReducer | None:
    """Open a reducer of gradients in device memory, or return None if they must go through the host; collective.

    All ranks decide alike, by the parameters, which they then compare, and by the result of open_group().

    current: this rank's runtime.
    parameters: whose gradients are reduced.
    group: the ranks that take part.
    options: op, factors and compression.
    statistics: counts the reductions.
    static: DistributedOptimizer's static_graph.

    Raises PlanMismatchError if the parameters differ between ranks, and what open_group() raises.
    """
    if not may_open(current.config):
        return None
    wires = [options.wire_for_tensor(tensor) for tensor in parameters.tensors]
    if not all(isinstance(wire, str) for wire in wires):
        if group.transport.rank == 0:
            logger.info("%s: coded gradients go through the host's memory, where they are coded.", parameters.name)
        return None
    devices = _open(current, parameters, group)
    if devices is None:
        return None
    tensors = [
        # A bucket has the wire dtype: copying into it rounds.
        tensor if wire == "none" else dataclasses.replace(tensor, dtype=str(wire))
        for tensor, wire in zip(parameters.tensors, wires, strict=True)
    ]
    return BucketReducer(
        _context(current, parameters.name, group, devices, static=static),
        tensors,
        parameters.gradients,
        options=dataclasses.replace(options, wire="none"),
        settings=device_plan_settings(current.config),
        statistics=statistics,
    )


def find_device_memory(current: Runtime, parameters: Parameters, group: Group) -> BucketMemory | None:
    """Open bucket memory for a sharded optimizer on the device, or return None for host memory; collective.

    Raises what open_group() raises.
    """
    devices = _open(current, parameters, group) if may_open(current.config) else None
    if devices is None:
        return None
    sums = current.config.device_sums
    return BucketMemory(_open_buckets(devices, sums), device_plan_settings(current.config), _on_device(devices, sums))


def _open(current: Runtime, parameters: Parameters, group: Group) -> TorchGroup | None:
    device = common_device(parameters.own_tensors("A reduction in device memory").parameters)
    return open_group(group.transport, device, device_settings(current.config), parameters.name)


def _open_buckets(devices: TorchGroup, sums: str) -> Callable[[Sequence[BucketSpec], int | None], TorchBuckets]:
    """Return what opens the owner's buckets. The owner keeps it, and the group while it does."""

    def open_buckets(specs: Sequence[BucketSpec], _: int | None) -> TorchBuckets:
        return TorchBuckets(devices, specs, sums)

    if devices.users is None:
        devices.users = weakref.WeakSet()
    devices.users.add(open_buckets)
    return open_buckets


def _context(current: Runtime, name: str, group: Group, devices: TorchGroup, *, static: bool) -> Context:
    current.plans += 1
    sums = current.config.device_sums
    return Context(
        group.transport,
        name,
        group.engine,
        current.timeline,
        open_buckets=_open_buckets(devices, sums),
        open_masks=functools.partial(DeviceMasks, static=static),
        device=_on_device(devices, sums),
    )


def _on_device(devices: TorchGroup, sums: str) -> OnDevice:
    streams, current_stream = devices.accelerator.streams, devices.accelerator.current_stream
    return OnDevice(DeviceClock(streams, current_stream), Streams(streams, current_stream), devices.check, sums)


runtime.on_wait_for_devices(wait_for_groups)
runtime.on_shutdown(close_groups)
