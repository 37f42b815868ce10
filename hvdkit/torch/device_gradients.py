"""Gradient buckets in GPU memory, which NCCL reduces during the backward pass."""

from __future__ import annotations

import dataclasses
import functools
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
from hvdkit.torch import gpu
from hvdkit.torch.device_masks import DeviceMasks
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.nccl.buckets import NcclBuckets
from hvdkit.transport.nccl.group import DeviceGroup
from hvdkit.transport.nccl.groups import close_groups, open_group, wait_for_groups
from hvdkit.transport.nccl.library import REDUCIBLE


def open_device_reducer(
    current: Runtime,
    parameters: Parameters,
    group: Group,
    options: ReduceOptions,
    statistics: Statistics,
    *,
    static: bool,
) -> GradientReducer | None:
    """Open a reducer of gradients in GPU memory, or return None if they must go through the host; collective.

    All ranks decide alike, by the parameters, which they then compare, and by the result of open_group().

    current: this rank's runtime.
    parameters: whose gradients are reduced.
    group: the ranks that take part.
    options: op, factors and compression.
    statistics: counts the reductions.
    static: DistributedOptimizer's static_graph.

    Raises PlanMismatchError if the parameters differ between ranks, and what open_group() raises.
    """
    if not gpu.is_cuda_build():
        return None
    wires = [options.wire_for_tensor(tensor) for tensor in parameters.tensors]
    if not all(isinstance(wire, str) for wire in wires):
        if group.transport.rank == 0:
            logger.info("%s: coded gradients go through the host's memory, where they are coded.", parameters.name)
        return None
    index = gpu.common_gpu(parameters.own_tensors("A reduction on the GPU").parameters)
    devices = open_group(
        group.transport, index, current.world.host, gpu.device_settings(current.config), parameters.name
    )
    if devices is None:
        return None
    assert index is not None
    tensors = [
        # A bucket has the wire dtype: copying into it rounds.
        tensor if wire == "none" else dataclasses.replace(tensor, dtype=str(wire))
        for tensor, wire in zip(parameters.tensors, wires, strict=True)
    ]
    assert all(tensor.dtype in (*REDUCIBLE, "complex64", "complex128") for tensor in tensors)
    return BucketReducer(
        _context(current, parameters.name, group, devices, index, static=static),
        tensors,
        parameters.gradients,
        options=dataclasses.replace(options, wire="none"),
        settings=device_plan_settings(current.config),
        statistics=statistics,
    )


def find_device_memory(current: Runtime, parameters: Parameters, group: Group) -> BucketMemory | None:
    """Open bucket memory for a sharded optimizer on the GPU, or return None for host memory; collective.

    Raises what open_group() raises.
    """
    if not gpu.is_cuda_build():
        return None
    index = gpu.common_gpu(parameters.own_tensors("A reduction on the GPU").parameters)
    devices = open_group(
        group.transport, index, current.world.host, gpu.device_settings(current.config), parameters.name
    )
    if devices is None:
        return None
    assert index is not None
    return BucketMemory(_open_buckets(devices, index), device_plan_settings(current.config), _on_device(devices, index))


def _open_buckets(devices: DeviceGroup, index: int) -> Callable[[Sequence[BucketSpec], int | None], NcclBuckets]:
    allocate, stream = gpu.make_allocate(index), functools.partial(gpu.current_stream, index)
    return lambda specs, _: NcclBuckets(devices, specs, allocate, gpu.scale, stream)


def _context(current: Runtime, name: str, group: Group, devices: DeviceGroup, index: int, *, static: bool) -> Context:
    current.plans += 1
    return Context(
        group.transport,
        name,
        group.engine,
        current.timeline,
        open_buckets=_open_buckets(devices, index),
        open_masks=functools.partial(DeviceMasks, static=static),
        device=_on_device(devices, index),
    )


def _on_device(devices: DeviceGroup, index: int) -> OnDevice:
    device, stream = devices.device, functools.partial(gpu.current_stream, index)
    return OnDevice(DeviceClock(device, stream), Streams(device, stream), devices.check)


runtime.on_wait_for_devices(wait_for_groups)
runtime.on_shutdown(close_groups)
