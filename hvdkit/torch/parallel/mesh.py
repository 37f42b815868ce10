"""Mesh: the ranks of the world as pipeline stages x replicas x tensor-parallel ranks, arranged by their hosts."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvdkit.engine import runtime as engine
from hvdkit.engine.basics import split_world
from hvdkit.engine.groups import ProcessSet
from hvdkit.engine.job_objects import allgather_object
from hvdkit.errors import ParallelError
from hvdkit.log import logger
from hvdkit.parallel.placement import AXES, complete_mesh_sizes, describe_slow_tensor_parallelism, place
from hvdkit.torch import basics
from hvdkit.torch.parallel.meter import StepMeter
from hvdkit.torch.process_group.register import NAME, join_world

_latest: list[Mesh] = []


def init(backend: str | None = None) -> None:
    """Join hvdkit's world and torch.distributed's, unless that has been done; a collective call.

    backend: of torch.distributed; default: hvdkit, and NCCL for tensors on a GPU.
    Raises ParallelError if the ranks of torch.distributed differ from hvdkit's.
    """
    basics.init()
    world = engine.runtime("parallel.init()").world
    join_world(backend or (f"cpu:{NAME},cuda:nccl" if torch.cuda.is_available() else NAME))
    if (dist.get_rank(), dist.get_world_size()) != (world.rank, world.size):
        raise ParallelError(
            f"torch.distributed calls this process rank {dist.get_rank()} of {dist.get_world_size()}, hvdkit calls it "
            f"rank {world.rank} of {world.size}. Do not call init_process_group() yourself, or call it without ranks."
        )


@functools.cache
def _watch_optimizers() -> None:
    """Make each optimizer step call stepped() of the newest mesh's meter."""

    def stepped(optimizer: torch.optim.Optimizer, _arguments: Any, _options: Any) -> None:
        for mesh in _latest:
            mesh.meter.stepped(optimizer)

    register_optimizer_step_post_hook(stepped)
    engine.on_shutdown(_latest.clear)


class Mesh:
    """dp replicas of a model, with layers divided over tp ranks and stages over pp ranks; a collective call.

    dp: number of replicas; None for as many as the ranks allow. tp groups lie inside a host, stages between hosts; a
    warning describes the cost if they cannot. shard(), tensor_parallel() and the others use the newest mesh.
    tp: number of tensor-parallel ranks.
    pp: number of pipeline stages.
    backend: see init(), which this calls.

    Attributes:
    placement: the rank at each coordinate.
    coordinates: of this rank, by axis, from 0.
    device_mesh: torch's, with the axes "pp", "dp" and "tp".
    meter: measures steps for `hvdkit profile`.

    Raises ParallelError if dp * tp * pp is not the number of ranks.
    """

    def __init__(self, *, dp: int | None = None, tp: int = 1, pp: int = 1, backend: str | None = None) -> None:
        basics.init()
        runtime = engine.runtime("Mesh()")
        world = runtime.world
        self.dp, self.tp, self.pp = complete_mesh_sizes(world.size, dp, tp, pp)
        init(backend)
        hosts = allgather_object(world.host, "parallel.hosts")
        self.placement = place(hosts, self.dp, self.tp, self.pp)
        self.coordinates = self.placement.coordinates(world.rank)
        self.rank = world.rank
        slow = describe_slow_tensor_parallelism(self.placement, hosts)
        if slow and world.rank == 0:
            logger.warning(slow)
        self.device = basics.local_device()
        self.device_mesh = DeviceMesh(self.device.type, torch.from_numpy(self.placement.ranks), mesh_dim_names=AXES)
        self._groups: dict[str, ProcessSet] = {}
        self.meter = StepMeter(repr(self), tuple(range(world.size)), self._find_waits())
        _watch_optimizers()
        _latest[:] = [self]

    def _find_waits(self) -> dict[str, Any]:
        """Return the waits of the axes' process groups, if they are hvdkit's."""
        groups: dict[str, Any] = {axis: self.device_mesh[axis].get_group() for axis in AXES if getattr(self, axis) > 1}
        if dist.group.WORLD not in groups.values():
            groups["world"] = dist.group.WORLD
        return {axis: group.waits for axis, group in groups.items() if hasattr(group, "waits")}

    def ranks(self, axis: str) -> list[int]:
        """Return the ranks along an axis that share this rank's other coordinates, in the order of the axis."""
        return self.placement.group(axis, self.rank)

    def group(self, axis: str) -> ProcessSet:
        """Return hvdkit's process set of `ranks(axis)`; the first call for an axis is collective and makes all groups.

        For DistributedOptimizer and the collectives: `process_set=mesh.group("dp")`.
        """
        if axis not in self._groups:
            groups = self.placement.groups(axis)
            color = next(number for number, ranks in enumerate(groups) if self.rank in ranks)
            process_set = split_world(color, self.coordinates[axis])
            assert process_set is not None, "it is None for a color of None only"
            self._groups[axis] = process_set
        return self._groups[axis]

    def __repr__(self) -> str:
        return f"Mesh(dp={self.dp}, tp={self.tp}, pp={self.pp})"


def take_mesh(mesh: Mesh | None, call: str) -> Mesh:
    """Return the given mesh, else the newest one. Raises ParallelError if none exists."""
    if mesh is None and not _latest:
        raise ParallelError(f"{call} needs a mesh. Make one first, on all ranks: Mesh(dp=..., tp=..., pp=...).")
    return mesh or _latest[0]
