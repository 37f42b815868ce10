"""The transports that the tests know, by name: each opens on all ranks of a job together."""

from __future__ import annotations

from collections.abc import Callable

from hvdkit.transport.api import Transport
from hvdkit.transport.between.base import BaseTransport
from hvdkit.transport.between.hierarchical import HierarchicalTransport
from hvdkit.transport.gloo.rendezvous import TransportRendezvousStore
from hvdkit.transport.gloo.transport import GlooTransport, open_gloo
from hvdkit.transport.mpi.transport import open_mpi
from hvdkit.transport.shared.transport import SharedMemoryTransport
from hvdkit.transport.single import SingleTransport


def _gloo() -> GlooTransport:
    """Gloo between ranks that mpirun has started: they meet through MPI, and use it no more."""
    mpi = open_mpi()
    transport = open_gloo(TransportRendezvousStore(mpi), mpi.rank, mpi.size, host="here")
    mpi.close()
    return transport


def _shared_memory(open_base: Callable[[], BaseTransport], small_bytes: int) -> Transport:
    base = open_base()
    return SharedMemoryTransport(base, base, host="here", small_bytes=small_bytes)


def _hierarchical(open_base: Callable[[], BaseTransport], node_of: Callable[[int], int]) -> Transport:
    base = open_base()
    nodes = [node_of(rank) for rank in range(base.size)]
    return HierarchicalTransport(base, nodes=nodes, host="here", small_bytes=1)


OPENERS: dict[str, Callable[[], Transport]] = {
    "single": lambda: SingleTransport(),
    "mpi": open_mpi,
    "shared_memory": lambda: _shared_memory(open_mpi, small_bytes=64 * 1024),
    "shared_memory_only": lambda: _shared_memory(open_mpi, small_bytes=1),
    "hierarchical_pairs": lambda: _hierarchical(open_mpi, lambda rank: rank // 2),
    "hierarchical_round_robin": lambda: _hierarchical(open_mpi, lambda rank: rank % 2),
    "hierarchical_uneven": lambda: _hierarchical(open_mpi, lambda rank: min(rank, 1)),
    "gloo": _gloo,
    "shared_memory_over_gloo": lambda: _shared_memory(_gloo, small_bytes=64 * 1024),
    "hierarchical_over_gloo": lambda: _hierarchical(_gloo, lambda rank: min(rank, 1)),
}
