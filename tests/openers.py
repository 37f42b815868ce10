"""The transports that the tests know, by name: each opens on all ranks of a job together."""

from __future__ import annotations

from collections.abc import Callable

from hvdkit.transport.base import Transport
from hvdkit.transport.hierarchical import HierarchicalTransport
from hvdkit.transport.mpi import open_mpi
from hvdkit.transport.shared_memory import SharedMemoryTransport
from hvdkit.transport.single import SingleTransport


def _shared_memory(small_bytes: int) -> Transport:
    base = open_mpi()
    return SharedMemoryTransport(base, base, host="here", small_bytes=small_bytes)


def _hierarchical(node_of: Callable[[int], int]) -> Transport:
    base = open_mpi()
    return HierarchicalTransport(base, host="here", small_bytes=1, node=node_of(base.rank))


OPENERS: dict[str, Callable[[], Transport]] = {
    "single": lambda: SingleTransport(),
    "mpi": open_mpi,
    "shared_memory": lambda: _shared_memory(small_bytes=64 * 1024),
    "shared_memory_only": lambda: _shared_memory(small_bytes=1),
    "hierarchical_pairs": lambda: _hierarchical(lambda rank: rank // 2),
    "hierarchical_round_robin": lambda: _hierarchical(lambda rank: rank % 2),
    "hierarchical_uneven": lambda: _hierarchical(lambda rank: min(rank, 1)),
}
