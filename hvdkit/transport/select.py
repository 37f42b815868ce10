"""Selects the transport between the ranks, and determines this process's rank.

| name | ranks | needs | when |
|---|---|---|---|
| single | one | nothing | a process without a launcher, or a world of one |
| mpi | any | MPI | one rank a host; or by the setting |
| gloo | any | torch | one rank a host, under torchrun or `horovodrun --gloo`; or by the setting |
| shared_memory | one host | mpi or gloo, /dev/shm | all ranks on one host |
| hierarchical | any | mpi or gloo, /dev/shm | several ranks on several hosts |
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit.config import Config
from hvdkit.errors import ConfigError, TransportError, WorldError
from hvdkit.transport.api import Transport
from hvdkit.transport.backend import Abort, Backend, Membership
from hvdkit.transport.between.base import BaseTransport
from hvdkit.transport.division import keep_places
from hvdkit.transport.rank_subset import RankSubset, runs_mpi
from hvdkit.transport.single import SingleTransport
from hvdkit.transport.small_collectives import gather_ints
from hvdkit.world import WITHOUT_MPI, World, complete_world, read_world

_first_place = -1  # the local rank of this process in its first world


def first_place() -> int:
    """Return the local rank of this process in its first world; -1 before. An elastic job keeps it if possible."""
    return _first_place


@dataclass(frozen=True)
class Connection:
    """Ranks that are connected over a backend, before it is known which of them share a host.

    world: has rank, size and job_ranks from the backend. base: their transport; None for one process by itself. abort:
    ends all ranks of the job; None if ending this process is enough.
    """

    world: World
    base: BaseTransport | None = None
    abort: Abort | None = None


def connect(config: Config, subset: RankSubset | None = None) -> Connection:
    """Connect the ranks over the backend that the configuration and the launcher select; collective.

    subset: the processes of the world, which alone call this; None for the whole job.
    Raises WorldError if launcher and backend disagree, ConfigError for a subset that does not exist or that the
    configuration does not allow, TransportError if the ranks cannot reach each other.
    """
    world = read_world()
    backend = choose_backend(config.transport, world, mpi_running=runs_mpi())
    if subset is not None and config.transport == "single":
        raise ConfigError(
            f"HVDKIT_TRANSPORT=single is for one process without MPI, but comm selects the ranks {list(subset.ranks)} "
            "of an MPI job. Leave out one of the two."
        )
    if backend == "none" and subset is None:
        if world.size > 1:
            raise WorldError(
                f"HVDKIT_TRANSPORT=single is for one process, but {world.launcher} started {world.size}. Leave "
                "HVDKIT_TRANSPORT out."
            )
        return Connection(dataclasses.replace(world, rank=0, size=1))
    base, abort = find_backend(backend if backend != "none" else "mpi").connect(world, subset)
    base.between.algorithm = config.algorithm
    base.between.check(())
    known: dict[str, Any] = {
        "rank": base.rank,
        "size": base.size,
        "job_ranks": subset.ranks if subset is not None else (),
    }
    return Connection(dataclasses.replace(world, **known), base, abort)


def open_transport(config: Config, connection: Connection) -> tuple[World, Transport]:
    """Find out which ranks share a host, and open the transport that the configuration selects; collective.

    Raises TransportError if this transport does not fit the ranks.
    """
    global _first_place
    world, base = connection.world, connection.base
    if base is None:
        alone: dict[str, Any] = {"local_rank": 0, "local_size": 1, "cross_rank": 0, "cross_size": 1}
        return complete_world(world, rank=0, size=1, **alone, homogeneous=True), SingleTransport()
    nodes = base.find_nodes()
    # A process of an elastic job has chosen its GPU by its first local rank, and keeps that number if possible.
    places = keep_places(nodes, gather_ints(base, _first_place) if config.elastic else [-1] * base.size)
    if _first_place < 0:
        _first_place = places[base.rank]
    cross = [rank for rank, place in enumerate(places) if place == places[base.rank]]
    local_sizes = [nodes.count(node) for node in nodes]
    world = complete_world(
        world,
        rank=base.rank,
        size=base.size,
        local_rank=places[base.rank],
        local_size=local_sizes[base.rank],
        cross_rank=cross.index(base.rank),
        cross_size=len(cross),
        homogeneous=len(set(local_sizes)) == 1,
        job_ranks=world.job_ranks,
    )
    name = choose_transport(config.transport, local_sizes, base.name)
    if name == "single":
        base.close()
        return world, SingleTransport()
    if name == base.name:
        if local_sizes[0] < base.size:  # several hosts: all ranks get the same result
            base.measure()
        return world, base
    options: dict[str, Any] = {"directory": config.shared_directory, "small_bytes": config.small_bytes}
    options["job_rank"] = world.job_rank
    if name == "shared_memory":
        from hvdkit.transport.shared.transport import SharedMemoryTransport

        return world, SharedMemoryTransport(base, base, host=world.host, **options)
    from hvdkit.transport.between.hierarchical import HierarchicalTransport

    return world, HierarchicalTransport(base, nodes=nodes, host=world.host, **options)


def find_backend(name: str) -> Backend:
    """Return the backend "mpi" or "gloo"; the first call of one of its functions loads the library."""
    if name == "mpi":
        from hvdkit.transport.mpi import backend as mpi

        return mpi
    from hvdkit.transport.gloo import backend as gloo

    return gloo


def find_membership(backend: str) -> Membership | None:
    """Return the Membership of an elastic world with this backend; None if the backend has only fixed worlds.

    A single rank ("none") may be the last rank of a world over MPI. Raises TransportError if the library does not
    support it.
    """
    return find_backend(backend if backend != "none" else "mpi").open_membership()


def end_process() -> None:
    """End MPI when Python ends, if neither the script nor mpi4py does; not collective."""
    if "mpi4py.MPI" in sys.modules:
        from hvdkit.transport.mpi.mailbox import wait_for_last_messages
        from hvdkit.transport.mpi.ulfm import leave_mpi

        wait_for_last_messages()
        leave_mpi()


def choose_backend(wish: str, world: World, *, mpi_running: bool) -> str:
    """Choose the backend that connects ranks without shared memory: "mpi", "gloo", or "none" for a single process.

    wish: the setting `transport`. mpi_running: the program has started MPI with more than one rank.
    """
    if wish in ("mpi", "gloo"):
        return wish
    if wish == "single":
        return "none"
    if world.launcher in WITHOUT_MPI:
        return "none" if wish == "auto" and world.size == 1 else "gloo"
    return "mpi" if wish != "auto" or world.launcher != "none" or mpi_running else "none"


def choose_transport(wish: str, local_sizes: Sequence[int], backend: str = "mpi") -> str:
    """Choose the transport for these ranks, by name.

    wish: the setting `transport`. local_sizes: for each rank, the number of ranks on its host. backend: moves bytes
    between hosts, from choose_backend(). Raises TransportError if the wish does not fit the ranks.
    """
    size = len(local_sizes)
    if wish == "shared_memory" and local_sizes[0] < size:
        raise TransportError(
            f"HVDKIT_TRANSPORT=shared_memory needs all {size} ranks on one host, but only {local_sizes[0]} are on "
            "the host of rank 0. Leave HVDKIT_TRANSPORT out, or set it to hierarchical."
        )
    if wish != "auto":
        return wish
    if size == 1:
        return "single"
    if max(local_sizes) == 1:
        return backend
    return "shared_memory" if local_sizes[0] == size else "hierarchical"
