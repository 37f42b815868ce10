"""The transport of several hosts with several ranks each: shared memory inside a host, MPI or Gloo between hosts.

Each byte crosses the network once per host: the ranks of a host add up one shard each, and the ranks that hold equal
shards reduce them between the hosts, all at once.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from hvdkit.transport.api import Transport
from hvdkit.transport.between.base import BaseTransport
from hvdkit.transport.between.select import BetweenHosts
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.division import divide_by_node
from hvdkit.transport.shared.buckets import SharedBuckets
from hvdkit.transport.shared.transport import SharedMemoryTransport
from hvdkit.transport.small_collectives import broadcast_bytes


class HierarchicalTransport(SharedMemoryTransport):
    """Combines shared memory with MPI or Gloo; hosts may have different numbers of ranks.

    base: transport of all ranks, for small messages and all operations except allreduce; closed with this transport.
    nodes: the host number of each rank; None to let `base` find it. Tests divide one host with it.
    options: see SharedMemoryTransport.
    """

    name = "hierarchical"

    def __init__(self, base: BaseTransport, *, nodes: Sequence[int] | None = None, **options: Any) -> None:
        self._nodes = base.find_nodes() if nodes is None else nodes
        hosts, crossings = divide_by_node(self._nodes)
        local, cross = base.split(hosts), base.split(crossings)
        assert local is not None and cross is not None, "each rank is on a host"
        self._cross = cross
        shards = min(len(ranks) for ranks in hosts)
        between = cross.between
        if local.rank >= shards:  # this rank reduces no shard, but must have the same settings
            between = BetweenHosts(base.between.algorithm, base.between.able, len(hosts))
        super().__init__(
            base,
            local,
            shards=shards,
            open_crossing=cross.open_crossing if local.rank < shards else None,
            **options,
        )
        self.between: BetweenHosts = between
        self.local_ranks = max(len(ranks) for ranks in hosts)
        self._takes_part = local.rank < shards
        if not self._is_part:
            self.measure()

    def measure(self) -> None:
        """See Transport.measure. All ranks that reduce a shard measure at once; all ranks get rank 0's numbers."""
        if self.between.hosts < 2 or self.between.measured is not None:
            return
        if self._takes_part:
            self._cross.measure()
        data = broadcast_bytes(self._base, pickle.dumps(self.between.measured), 0)
        self.between.measured = pickle.loads(data)

    def open_buckets(self, specs: Sequence[BucketSpec], depth: int | None = None) -> SharedBuckets:
        self.measure()
        return super().open_buckets(specs, depth)

    def _above(self, base: Transport, ranks: Sequence[int]) -> Transport:
        assert isinstance(base, BaseTransport)
        base.between.algorithm = self.between.algorithm  # it may have been changed since
        nodes = [self._nodes[rank] for rank in ranks]
        return HierarchicalTransport(base, nodes=nodes, **self._options_of(ranks))

    def close(self, *, idle: bool = True) -> None:
        super().close(idle=idle)
        self._cross.close(idle=idle)
