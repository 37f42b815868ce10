"""Moving bytes between ranks: which transport, and who this process turns out to be.

| name | ranks | needs | when |
|---|---|---|---|
| single | one | nothing | a process that nobody launched, or a world of one |
| mpi | any | MPI | one rank a host; or by wish |
| shared_memory | one host | MPI, /dev/shm | all ranks on one host |
| hierarchical | any | MPI, /dev/shm | several ranks on several hosts |
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from hvdkit.config import Config
from hvdkit.errors import TransportError, WorldError
from hvdkit.hook import install_exception_hook
from hvdkit.transport.base import Transport
from hvdkit.transport.single import SingleTransport
from hvdkit.transport.small import gather_ints
from hvdkit.world import World, check_world, complete_world, read_world, under_agent

Abort = Callable[[int], None]


def open_transport(config: Config) -> tuple[World, Transport, Abort | None]:
    """Find out who this process is, and open the transport that the configuration asks for; collective.

    Returns also what ends all ranks of the job, or None where ending this process is enough.
    Raises WorldError if launcher and MPI disagree, TransportError if the transport asked for does not fit the ranks.
    """
    world = read_world()
    if config.transport == "single" or (config.transport == "auto" and not _mpi_wanted(world)):
        if world.size > 1:
            raise WorldError(
                f"HVDKIT_TRANSPORT=single is for one process, and {world.launcher} started {world.size}. Leave it out."
            )
        return _alone(world)
    from hvdkit.transport import mpi, mpi_library

    base = mpi.open_mpi()
    check_world(world, base.size, mpi_library.describe_mpi())
    local, cross = base.split_by_node()
    local_sizes = gather_ints(base, local.size)
    world = complete_world(
        world,
        rank=base.rank,
        size=base.size,
        local_rank=local.rank,
        local_size=local.size,
        cross_rank=cross.rank,
        cross_size=cross.size,
        homogeneous=len(set(local_sizes)) == 1,
    )
    local.close()
    cross.close()
    abort = None if under_agent() else mpi_library.abort
    install_exception_hook(world.rank, world.host, abort)  # what fails below may fail on some ranks only
    name = choose_transport(config.transport, local_sizes)
    if name == "single":
        base.close()
        return world, SingleTransport(), abort
    if name == "mpi":
        return world, base, abort
    options: dict[str, Any] = {"directory": config.shared_directory, "small_bytes": config.small_bytes}
    if name == "shared_memory":
        from hvdkit.transport.shared_memory import SharedMemoryTransport

        return world, SharedMemoryTransport(base, base, host=world.host, **options), abort
    from hvdkit.transport.hierarchical import HierarchicalTransport

    return world, HierarchicalTransport(base, host=world.host, **options), abort


def choose_transport(wish: str, local_sizes: Sequence[int]) -> str:
    """The transport's name for these ranks. local_sizes: of each rank, how many ranks its host has.

    Raises TransportError if the wish does not fit.
    """
    size = len(local_sizes)
    if wish == "shared_memory" and local_sizes[0] < size:
        raise TransportError(
            f"HVDKIT_TRANSPORT=shared_memory is for one host, and {local_sizes[0]} of {size} ranks are on rank 0's. "
            f"Leave it out, or use hierarchical."
        )
    if wish != "auto":
        return wish
    if size == 1:
        return "single"
    if max(local_sizes) == 1:
        return "mpi"
    return "shared_memory" if local_sizes[0] == size else "hierarchical"


def _mpi_wanted(world: World) -> bool:
    """Has a launcher started this process, or has the program started MPI by itself?"""
    if world.launcher != "none":
        return True
    loaded = sys.modules.get("mpi4py.MPI")
    return loaded is not None and loaded.Is_initialized() and loaded.COMM_WORLD.Get_size() > 1


def _alone(world: World) -> tuple[World, Transport, None]:
    alone = {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1, "cross_rank": 0, "cross_size": 1}
    return complete_world(world, **alone, homogeneous=True), SingleTransport(), None
