"""Moving bytes between ranks: which transport, and who this process turns out to be.

| name | ranks | needs | when |
|---|---|---|---|
| single | one | nothing | a process that nobody launched, or a world of one |
| mpi | any | MPI | one rank a host; or by wish |
| gloo | any | torch | one rank a host, under torchrun or `horovodrun --gloo`; or by wish |
| shared_memory | one host | mpi or gloo, /dev/shm | all ranks on one host |
| hierarchical | any | mpi or gloo, /dev/shm | several ranks on several hosts |
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hvdkit.config import Config, read_environment
from hvdkit.errors import ConfigError, MissingDependencyError, TransportError, WorldError
from hvdkit.hook import install_exception_hook
from hvdkit.launcher_channel import LOST, listen_to_hvdrun, on_news
from hvdkit.transport.api import BaseTransport, Transport
from hvdkit.transport.mpi.pmix import tell_mpi_of_loss
from hvdkit.transport.single import SingleTransport
from hvdkit.transport.small_collectives import gather_ints
from hvdkit.world import WITHOUT_MPI, World, check_world, complete_world, read_world, under_agent

if TYPE_CHECKING:
    from hvdkit.transport.mpi.world_part import Part

Abort = Callable[[int], None]


def open_transport(config: Config, part: Part | None = None) -> tuple[World, Transport, Abort | None]:
    """Find out who this process is, and open the transport that the configuration asks for; collective.

    part: the processes that make the world, and alone call this; None for all of the job.
    Returns also what ends all ranks of the job, or None where ending this process is enough.
    Raises WorldError if launcher and MPI disagree, TransportError if the transport asked for does not fit the ranks,
    ConfigError for a part that there is not, or that the configuration does not allow.
    """
    world = read_world()
    carrier = choose_carrier(config.transport, world, mpi_running=_runs_mpi())
    if part is not None and config.transport == "single":
        raise ConfigError(
            f"HVDKIT_TRANSPORT=single is for a process without MPI, and comm names ranks {list(part.ranks)} of an MPI "
            f"job. Leave one of the two out."
        )
    if carrier == "none" and part is None:
        if world.size > 1:
            raise WorldError(
                f"HVDKIT_TRANSPORT=single is for one process, and {world.launcher} started {world.size}. Leave it out."
            )
        return _alone(world)
    base, abort = _open_gloo(world, part) if carrier == "gloo" else _open_mpi(world, part)
    if carrier == "mpi" and config.elastic:
        on_news(LOST, tell_mpi_of_loss)
        listen_to_hvdrun(config.news)
    base.between.algorithm = config.algorithm
    base.between.check(())
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
        job_ranks=part.ranks if part is not None else (),
    )
    local.close()
    cross.close()
    install_exception_hook(world.label, world.host, abort)  # what fails below may fail on some ranks only
    name = choose_transport(config.transport, local_sizes, base.name)
    if name == "single":
        base.close()
        return world, SingleTransport(), abort
    if name == base.name:
        if local_sizes[0] < base.size:  # several hosts, as all ranks see it
            base.measure()
        return world, base, abort
    options: dict[str, Any] = {"directory": config.shared_directory, "small_bytes": config.small_bytes}
    options["job_rank"] = world.job_rank
    if name == "shared_memory":
        from hvdkit.transport.shared.transport import SharedMemoryTransport

        return world, SharedMemoryTransport(base, base, host=world.host, **options), abort
    from hvdkit.transport.between.hierarchical import HierarchicalTransport

    return world, HierarchicalTransport(base, host=world.host, **options), abort


def choose_carrier(wish: str, world: World, *, mpi_running: bool) -> str:
    """What moves bytes between ranks that share no memory: "mpi", "gloo", or "none" for a process by itself.

    mpi_running: has the program started MPI, with more ranks than one?
    """
    if wish in ("mpi", "gloo"):
        return wish
    if wish == "single":
        return "none"
    if world.launcher in WITHOUT_MPI:
        return "none" if wish == "auto" and world.size == 1 else "gloo"
    return "mpi" if wish != "auto" or world.launcher != "none" or mpi_running else "none"


def choose_transport(wish: str, local_sizes: Sequence[int], carrier: str = "mpi") -> str:
    """The transport's name for these ranks. local_sizes: of each rank, how many ranks its host has.

    carrier: what moves bytes between hosts, as choose_carrier says it.

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
        return carrier
    return "shared_memory" if local_sizes[0] == size else "hierarchical"


def _runs_mpi() -> bool:
    """Has the program started MPI by itself?"""
    loaded = sys.modules.get("mpi4py.MPI")
    return loaded is not None and loaded.Is_initialized() and loaded.COMM_WORLD.Get_size() > 1


def _open_mpi(world: World, part: Part | None) -> tuple[BaseTransport, Abort | None]:
    from hvdkit.transport.mpi import library as mpi_library
    from hvdkit.transport.mpi import transport as mpi
    from hvdkit.transport.mpi import ulfm as mpi_world
    from hvdkit.transport.mpi import world_part as mpi_part

    base = mpi.open_mpi(comm=mpi_part.open_part(part, world) if part is not None else None)
    if part is None and not mpi_world.has_changed():
        check_world(world, base.size, mpi_library.describe_mpi())
    return base, None if under_agent() else mpi_library.abort


def _open_gloo(world: World, part: Part | None) -> tuple[BaseTransport, Abort | None]:
    """Where there is MPI it is only asked where rank 0 is."""
    from hvdkit.transport.addresses import address_towards
    from hvdkit.transport.gloo import library as gloo_library
    from hvdkit.transport.gloo import transport as gloo
    from hvdkit.transport.gloo.rendezvous_store import (
        BoardPlace,
        LocalBoard,
        TransportBoard,
        find_board,
        read_interface,
    )

    variables = read_environment()
    options: dict[str, Any] = {"host": world.host, "interface": read_interface(variables)}
    try:
        gloo_library.load_gloo()
    except MissingDependencyError as error:
        raise MissingDependencyError(
            f"Ranks that {world.launcher} has started without MPI talk through torch's Gloo. {error}. Or start the "
            f"script with hvdrun, which takes MPI."
        ) from error
    only_mpi_knows = part is not None or world.size == 0 or (world.launcher == "none" and _runs_mpi())
    if world.size == 1 and not only_mpi_knows:
        return gloo.open_gloo(LocalBoard(), 0, 1, **options), None
    place = BoardPlace("mpi") if only_mpi_knows else find_board(variables, world.launcher)
    if place.kind == "mpi":
        asked, abort = _open_mpi(world, part)
        if part is not None:
            options["towards"] = address_towards(world.host)
            options["host"] = f"{world.host} (job rank {part.ranks[asked.rank]})"
        base = gloo.open_gloo(TransportBoard(asked), asked.rank, asked.size, **options)
        asked.close()
        return base, abort
    board, towards = gloo.open_board(place, world.rank)
    return gloo.open_gloo(board, world.rank, world.size, towards=towards, **options), None


def _alone(world: World) -> tuple[World, Transport, None]:
    alone: dict[str, Any] = {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1, "cross_rank": 0, "cross_size": 1}
    return complete_world(world, **alone, homogeneous=True), SingleTransport(), None
