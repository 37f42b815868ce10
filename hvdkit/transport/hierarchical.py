"""Several hosts with several ranks each: shared memory inside a host, MPI between hosts.

Each byte crosses the network once per host: the ranks of a host add up one shard each, and the ranks that hold equal
shards reduce them between the hosts, all at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.transport.base import Transport
from hvdkit.transport.mpi import MpiCrossing, MpiTransport
from hvdkit.transport.shared_memory import SharedMemoryTransport
from hvdkit.transport.small import gather_ints


class HierarchicalTransport(SharedMemoryTransport):
    """Shared memory below MPI; hosts may have different numbers of ranks.

    base: all ranks; small messages and whatever is no allreduce go through it. Closed with this one.
    node: a number for this rank's host, given by all ranks or none (then MPI knows); tests split one host with it.
    """

    name = "hierarchical"

    def __init__(
        self,
        base: MpiTransport,
        *,
        host: str,
        directory: str = "/dev/shm",
        small_bytes: int = 64 * 1024,
        node: int | None = None,
    ) -> None:
        self._mpi, self._node = base, node
        local, self._cross = base.split_by_node(node)
        shards = min(gather_ints(base, local.size))
        super().__init__(
            base,
            local,
            host=host,
            directory=directory,
            small_bytes=small_bytes,
            shards=shards,
            open_crossing=self._open_crossing if local.rank < shards else None,
        )

    def _open_crossing(self) -> MpiCrossing:
        return self._cross.open_crossing()

    def subgroup(self, ranks: Sequence[int]) -> Transport | None:
        """See Transport.subgroup."""
        base = self._mpi.subgroup(ranks)
        if base is None or base.size == 1:
            return base
        return HierarchicalTransport(
            base, host=self._host, directory=self._directory, small_bytes=self._small_bytes, node=self._node
        )

    def close(self) -> None:
        """See Transport.close."""
        super().close()
        self._cross.close()
