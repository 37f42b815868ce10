"""Joining the world with Horovod's core: who this process is, as Horovod says, and the transport of all ranks."""

from __future__ import annotations

import numpy as np

from hvdkit.config import Config
from hvdkit.engine.horovod.binding import Binding, horovod_version, open_binding
from hvdkit.engine.horovod.environment import tell_horovod
from hvdkit.engine.horovod.real import real_horovod
from hvdkit.engine.horovod.sets import Sets
from hvdkit.engine.horovod.transport import HorovodTransport, describe
from hvdkit.errors import ConfigError, WorldError
from hvdkit.hook import install_exception_hook
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import Buffer
from hvdkit.transport.mpi import library as mpi_library
from hvdkit.transport.mpi.library import call_mpi
from hvdkit.transport.mpi.world_part import Part, open_part
from hvdkit.transport.select import Abort
from hvdkit.world import World, check_world, complete_world, read_world, under_agent


def open_horovod(
    config: Config, framework: str, part: Part | None = None
) -> tuple[World, HorovodTransport, Abort | None, Binding]:
    """Start Horovod, and return what open_transport() does, and Horovod itself.

    framework: whose binding is needed; "" if any will do. part: the processes that make the world; None for all.
    Raises MissingDependencyError if Horovod or its binding is missing, WorldError if it and the launcher disagree, or
    it does not start.
    """
    world = read_world()
    binding = open_binding(framework)
    basics = binding.basics
    by_mpi = world.launcher not in ("horovodrun", "torchrun") and bool(basics.mpi_built())
    if by_mpi and mpi_library.can_load_mpi():
        mpi_library.load_mpi()  # ended at exit: Horovod would end it with its shutdown(), and there is but one start
    abort = mpi_library.abort if by_mpi and mpi_library.can_load_mpi() and not under_agent() else None
    install_exception_hook(world.rank, world.host, abort)
    tell_horovod(config)
    if part is not None and not by_mpi:
        raise ConfigError(
            f"comm names ranks {list(part.ranks)} of the job, and the Horovod that is installed here was built without "
            f"MPI. Run `hvdkit build-horovod` where there is an MPI, or set HVDKIT_ENGINE=native."
        )
    comm = open_part(part, world) if part is not None else None
    try:
        binding.init("dynamic", comm)
    except ValueError as error:
        raise WorldError(f"Horovod does not start: {error} Its own messages stand above this one.") from error
    finally:
        if comm is not None:
            call_mpi("MPI_Comm_free", comm.Free)  # Horovod has one of its own
    if (
        part is None and world.launcher != "horovodrun"
    ):  # which tells Horovod of later worlds, and the variables stay as they were
        check_world(world, basics.size(), f"Horovod {horovod_version()} ({describe(basics)})")
    world = complete_world(
        world,
        rank=basics.rank(),
        size=basics.size(),
        local_rank=basics.local_rank(),
        local_size=basics.local_size(),
        cross_rank=basics.cross_rank(),
        cross_size=basics.cross_size(),
        homogeneous=basics.is_homogeneous(),
        job_ranks=part.ranks if part is not None else (),
    )
    return world, _open_transport(binding, world), abort, binding


_worlds = 0  # that this process, or one that it has met, has been in


def begin_generation(transport: Transport, binding: Binding) -> None:
    """Give operations other names than in earlier worlds; collective.

    Where a world ended with an error Horovod may hold some of its operations still, and take none of the same name.
    """
    global _worlds
    count = Buffer(np.array([_worlds], np.int32), "int32")
    transport.allreduce(count, "max")
    earlier = int(count.array[0])
    binding.prefix = f"world{earlier}." if earlier else ""
    _worlds = earlier + 1


def _open_transport(binding: Binding, world: World) -> HorovodTransport:
    with real_horovod():
        from horovod.common.process_sets import add_process_set, global_process_set

    sets = Sets(global_process_set, world.size, add_process_set)
    return HorovodTransport(binding, sets, range(world.size), world.rank)
