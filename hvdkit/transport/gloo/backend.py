"""Gloo as a backend (see transport/backend.py), for ranks that were started without MPI, or by the setting."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hvdkit.config import read_environment
from hvdkit.errors import MissingDependencyError, WorldError
from hvdkit.transport.addresses import address_towards, read_interface
from hvdkit.transport.backend import Abort, Membership
from hvdkit.transport.gloo.library import can_load_gloo, load_gloo
from hvdkit.transport.gloo.rendezvous import (
    StoreLocation,
    TransportRendezvousStore,
    find_rendezvous_store,
)
from hvdkit.transport.gloo.transport import GlooTransport, open_gloo, open_rendezvous_store
from hvdkit.transport.rank_subset import RankSubset, runs_mpi
from hvdkit.transport.single import SingleTransport
from hvdkit.world import World

can_load = can_load_gloo

#: Variable with the secret of the job, 64 hex digits, if the system that starts the ranks has sent it to each of them.
JOB_SECRET = "HVDKIT_JOB_SECRET"


def connect(world: World, subset: RankSubset | None) -> tuple[GlooTransport, Abort | None]:
    """See Backend.connect. If only MPI knows the ranks, it is used only to find the address of rank 0."""
    variables = read_environment()
    options: dict[str, Any] = {"host": world.host, "interface": read_interface(variables)}
    try:
        load_gloo()
    except MissingDependencyError as error:
        raise MissingDependencyError(
            f"{world.launcher} started the ranks without MPI, so they communicate over torch's Gloo. {error}. Or "
            "start the script with hvdrun, which uses MPI."
        ) from error
    only_mpi_knows = subset is not None or world.size == 0 or (world.launcher == "none" and runs_mpi())
    if world.size == 1 and not only_mpi_knows:
        return open_gloo(TransportRendezvousStore(SingleTransport()), 0, 1, **options), None
    place = StoreLocation("mpi") if only_mpi_knows else find_rendezvous_store(variables, world.launcher)
    if place.kind == "mpi":
        from hvdkit.transport.mpi import backend as mpi

        mpi_transport, abort = mpi.connect(world, subset)
        if subset is not None:
            options["towards"] = address_towards(world.host)
            options["host"] = f"{world.host} (job rank {subset.ranks[mpi_transport.rank]})"
        transport = open_gloo(
            TransportRendezvousStore(mpi_transport), mpi_transport.rank, mpi_transport.size, **options
        )
        mpi_transport.close()
        return transport, abort
    secret = _read_secret(variables)
    # A later store may get the port of an earlier store; its world has another secret.
    options |= {"secret": secret, "store_name": f"{place.address}:{place.port} {secret}"}
    store, towards = open_rendezvous_store(place, world.rank)
    return open_gloo(store, world.rank, world.size, towards=towards, **options), None


def _read_secret(variables: Mapping[str, str]) -> str:
    secret = variables.get(JOB_SECRET, "")
    if secret and not re.fullmatch("[0-9a-f]{64}", secret):
        raise WorldError(f"{JOB_SECRET} has {len(secret)} characters; it must be 64 hex digits, the same on all ranks.")
    return secret


def takes_calls_from_threads() -> bool:
    """See Backend.takes_calls_from_threads. Horovod queries it for MPI only."""
    return False


def open_membership() -> Membership | None:
    """See Backend.open_membership."""
    return None
