"""Several hosts with several ranks each: shared memory inside a host, another transport between hosts.

Each byte crosses the network once per host: the ranks of a host add up one shard each, and the ranks that hold equal
shards reduce them between the hosts, all at once.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

from hvdkit.transport.api import BaseTransport, Crossing, Transport
from hvdkit.transport.between.select import BetweenHosts
from hvdkit.transport.shared.transport import SharedMemoryTransport
from hvdkit.transport.small_collectives import broadcast_bytes, gather_ints


class HierarchicalTransport(SharedMemoryTransport):
    """Shared memory below MPI or Gloo; hosts may have different numbers of ranks.

    base: all ranks; small messages and whatever is no allreduce go through it. Closed with this one.
    node: a number for this rank's host, given by all ranks or none (then the base knows); tests split one host with it.
    job_rank: see World, for messages.
    """

    name = "hierarchical"

    def __init__(
        self,
        base: BaseTransport,
        *,
        host: str,
        directory: str = "/dev/shm",
        small_bytes: int = 64 * 1024,
        node: int | None = None,
        job_rank: int | None = None,
    ) -> None:
        self._spanning, self._node = base, node
        local, self._cross = base.split_by_node(node)
        shards = min(gather_ints(base, local.size))
        between, hosts = self._cross.between, max(gather_ints(base, self._cross.size))
        if local.rank >= shards:  # stands beside, and is to know the same
            between = BetweenHosts(base.between.algorithm, base.between.able, hosts)
        super().__init__(
            base,
            local,
            host=host,
            directory=directory,
            small_bytes=small_bytes,
            shards=shards,
            open_crossing=self._open_crossing if local.rank < shards else None,
            job_rank=job_rank,
        )
        self.between: BetweenHosts = between
        if hosts > 1:
            self._measure(local.rank < shards)

    def _measure(self, takes_part: bool) -> None:
        """Find out what is fast while all that reduce a shard use the wire; rank 0's numbers are everyone's."""
        if takes_part:
            self._cross.measure()
        told = broadcast_bytes(self._spanning, pickle.dumps(self.between.measured), 0)
        self.between.measured = pickle.loads(told)

    def _open_crossing(self) -> Crossing:
        return self._cross.open_crossing()

    def subgroup(self, ranks: Sequence[int]) -> Transport | None:
        """See Transport.subgroup."""
        base = self._spanning.subgroup(ranks)
        if base is None or base.size == 1:
            return base
        base.between.algorithm = self.between.algorithm  # which may have been set since
        return HierarchicalTransport(
            base,
            host=self._host,
            directory=self._directory,
            small_bytes=self._small_bytes,
            node=self._node,
            job_rank=self._job_rank,
        )

    def close(self, *, idle: bool = True) -> None:
        """See Transport.close."""
        super().close(idle=idle)
        self._cross.close(idle=idle)
