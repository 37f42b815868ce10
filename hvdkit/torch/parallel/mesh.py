"""Mesh: the ranks of the world as pipeline stages x replicas x tensor-parallel ranks, placed by their hosts."""

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
from hvdkit.parallel.placement import AXES, describe_slow_tensor_parallelism, place, settle_sizes
from hvdkit.torch import basics
from hvdkit.torch.parallel.meter import StepMeter
from hvdkit.torch.process_group.register import NAME, join_world

_latest: list[Mesh] = []


def init(backend: str | None = None) -> None:
    """Join hvdkit's world and torch.distributed's, where that has not been done; a collective call.

    backend: of torch.distributed; default: hvdkit, and NCCL for tensors on a GPU.
    Raises ParallelError where the ranks of torch.distributed are others than hvdkit's.
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
    """Tell the meter of the mesh that was made last of each step of an optimizer."""

    def stepped(optimizer: torch.optim.Optimizer, _arguments: Any, _options: Any) -> None:
        for mesh in _latest:
            mesh.meter.stepped(optimizer)

    register_optimizer_step_post_hook(stepped)
    engine.on_shutdown(_latest.clear)


class Mesh:
    """dp replicas of a model, whose layers are cut over tp ranks and whose stages over pp; a collective call.

    dp: None for as many replicas as there are ranks for. tp groups lie inside a host, stages between hosts; a warning
    says what it costs where they cannot. shard(), tensor_parallel() and the others use the mesh that was made last.
    backend: see init(), which this calls.

    placement: which rank is where. coordinates: of this rank, by axis, from 0. device_mesh: torch's, with the axes
    "pp", "dp" and "tp". meter: what `hvdkit profile` learns its steps from.
    Raises ParallelError where dp * tp * pp is not the number of ranks.
    """

    def __init__(self, *, dp: int | None = None, tp: int = 1, pp: int = 1, backend: str | None = None) -> None:
        basics.init()
        runtime = engine.runtime("Mesh()")
        world = runtime.world
        self.dp, self.tp, self.pp = settle_sizes(world.size, dp, tp, pp)
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
        """The waits of the process groups of the axes, as far as they are hvdkit's."""
        groups: dict[str, Any] = {axis: self.device_mesh[axis].get_group() for axis in AXES if getattr(self, axis) > 1}
        if dist.group.WORLD not in groups.values():
            groups["world"] = dist.group.WORLD
        return {axis: group.waits for axis, group in groups.items() if hasattr(group, "waits")}

    def ranks(self, axis: str) -> list[int]:
        """The ranks along an axis that share this rank's other coordinates, in the order of the axis."""
        return self.placement.group(axis, self.rank)

    def group(self, axis: str) -> ProcessSet:
        """hvdkit's process set of `ranks(axis)`; the first call for an axis is collective, and makes all its groups.

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
    """The given mesh, else the one that was made last. Raises ParallelError if there is none."""
    if mesh is None and not _latest:
        raise ParallelError(f"{call} needs a mesh. Make one first, on all ranks: Mesh(dp=..., tp=..., pp=...).")
    return mesh or _latest[0]
