"""Registration of the backend at torch.distributed, and construction of its process groups."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.rendezvous import _rendezvous_handlers

from hvdkit.engine import runtime as engine
from hvdkit.errors import WorldError
from hvdkit.torch.basics import init
from hvdkit.torch.process_group.group import HvdkitProcessGroup
from hvdkit.transport.small_collectives import broadcast_bytes
from hvdkit.world import has_master_address

NAME = "hvdkit"

#: All existing process groups, and the first one of all ranks.
_groups: weakref.WeakSet[HvdkitProcessGroup] = weakref.WeakSet()
_world: HvdkitProcessGroup | None = None
#: torch.distributed's world, if join_world() has joined it.
_joined: list[Any] = []


def register() -> None:
    """Register init_process_group("hvdkit"), which also works without MASTER_ADDR, as under mpirun and srun."""
    if NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, make_process_group, extended_api=True, devices=["cpu"])
    _rendezvous_handlers["env"] = _find_ranks
    engine.on_shutdown(_close_all)


def join_world(backend: str = NAME) -> None:
    """Join torch.distributed's world with hvdkit's ranks, unless it was joined; shutdown() ends it. Collective.

    backend: of torch.distributed.
    """
    if dist.is_initialized():
        return
    register()
    world = engine.runtime("init_process_group()").world
    store = dist.HashStore() if world.size == 1 else None  # type: ignore[attr-defined]
    dist.init_process_group(backend, rank=world.rank, world_size=world.size, store=store)
    _joined[:] = [dist.group.WORLD]
    _leave_at_shutdown()


@functools.cache
def _leave_at_shutdown() -> None:
    def leave() -> None:
        if dist.is_initialized() and dist.group.WORLD in _joined:
            dist.destroy_process_group()
        _joined.clear()

    engine.on_shutdown(leave)


def make_process_group(options: Any, _backend_options: Any = None) -> HvdkitProcessGroup:
    """Make the group of all ranks, or of some of them; collective among its ranks. Calls hvd.init() if necessary.

    options: torch's _DistributedBackendOptions.
    Raises WorldError if rank and size are not those of this process, or for a group of some ranks if the group of all
    ranks has another backend; and what hvd.init() raises.
    """
    global _world
    init()
    runtime, ranks = engine.runtime('init_process_group("hvdkit")'), options.global_ranks_in_group
    whole = None if _world is None or _world.closed else _world
    if whole is not None and ranks:
        transport = whole.transport.create_group(ranks)
    elif len(ranks) in (0, runtime.world.size):
        _check_place(options.group_rank, options.group_size)
        transport = runtime.sets.open_transport("init_process_group")
    else:
        raise WorldError(
            f'new_group({ranks}, backend="hvdkit") needs a group of all ranks before: call '
            'init_process_group("hvdkit") or, beside another backend, new_group(backend="hvdkit").'
        )
    group = HvdkitProcessGroup(options.store, transport, options.group_id, options.timeout.total_seconds())
    _world = whole or group
    _groups.add(group)
    return group


def _check_place(rank: int, size: int) -> None:
    world = engine.runtime('init_process_group("hvdkit")').world
    if (rank, size) != (world.rank, world.size):
        raise WorldError(
            f"init_process_group() was told rank {rank} of {size}, but hvdkit has rank {world.rank} of {world.size}"
            f"{' (from ' + world.launcher + ')' if world.launcher else ''}. Leave out rank and world_size, and unset "
            "RANK and WORLD_SIZE."
        )


_torch_env = _rendezvous_handlers["env"]


def _find_ranks(
    url: str, timeout: timedelta = dist.default_pg_timeout, **options: Any
) -> Iterator[tuple[Store, int, int]]:
    """torch's rendezvous by variables; without MASTER_ADDR and MASTER_PORT, hvdkit finds the ranks itself."""
    if has_master_address():
        yield from _torch_env(url, timeout=timeout, **options)
        return
    init()
    runtime = engine.runtime("init_process_group()")
    world = runtime.world
    here = world.local_size == world.size
    transport = runtime.sets.open_transport("init_process_group")
    place = b""
    if world.rank == 0:
        store = TCPStore("localhost", 0, world.size, True, timeout, wait_for_workers=False)
        place = f"{'localhost' if here else world.host} {store.port}".encode()
    host, port = broadcast_bytes(transport, place, 0).decode().rsplit(" ", 1)
    transport.close(idle=False)
    if world.rank:
        store = TCPStore(host, int(port), world.size, False, timeout, wait_for_workers=False)
    yield store, world.rank, world.size


def _close_all() -> None:
    for group in list(_groups):
        group.close()
    _groups.clear()
    _clear_sharded_results()


def _clear_sharded_results() -> None:
    """Clear torch's caches of the placements of DTensors, which hold the meshes of the ended world.

    An equal mesh of the next world would otherwise use process groups that no longer exist ("Could not resolve the
    process group"), with torch's own backends too.
    """
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if dtensor is None:
        return
    propagate = dtensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    getattr(propagate, "cache", propagate).cache_clear()
    if hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache"):  # torch 2.10 and later
        torch._C._clear_DTensor_sharding_propagator_cache()
