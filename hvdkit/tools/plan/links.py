"""Seconds of communication: alpha-beta formulas of rings (Thakur et al. 2005), over links placed as Megatron-LM does.

Ranks are numbered so that tensor parallelism is innermost, then data parallelism, then the pipeline.
"""

from __future__ import annotations

import math

from hvdkit.tools.plan.calibration import Calibration
from hvdkit.tools.plan.cluster import Cluster
from hvdkit.tools.plan.layout import Layout


def tensor_bandwidth(cluster: Cluster, layout: Layout, constants: Calibration) -> float:
    """Bytes a second of a ring of the tp ranks."""
    return _ring_bandwidth(cluster, constants, layout.tp, 1)


def data_bandwidth(cluster: Cluster, layout: Layout, constants: Calibration) -> float:
    """Bytes a second of a ring of the dp ranks, while the other rings of the node use the network as well."""
    return _ring_bandwidth(cluster, constants, layout.dp, layout.tp)


def stage_bandwidth(cluster: Cluster, layout: Layout, constants: Calibration) -> float:
    """Bytes a second from a stage of the pipeline to the next; from rank to rank, all at the same time."""
    inside = 2 * layout.dp * layout.tp <= cluster.node or cluster.gpus <= cluster.node
    if inside:
        return cluster.gpu.link * constants.link_efficiency
    return cluster.gpu.network * constants.network_efficiency


def ring_s(nbytes: float, ranks: int, bandwidth: float, constants: Calibration, *, passes: int = 2) -> float:
    """Seconds of an allreduce (2 passes), a reduce-scatter or an allgather (1 pass) of `nbytes` on `ranks`."""
    if ranks == 1:
        return 0.0
    latency = constants.collective_s * (1 + math.log2(ranks)) * passes / 2
    return latency + passes * (ranks - 1) / ranks * nbytes / bandwidth


def _ring_bandwidth(cluster: Cluster, constants: Calibration, ranks: int, stride: int) -> float:
    """Of a ring of ranks that are `stride` apart. In a node each ring has the network's share of its members there."""
    inside = cluster.gpu.link * constants.link_efficiency
    if cluster.gpus <= cluster.node or ranks * stride <= cluster.node:
        return inside
    members = max(1, cluster.node // stride)
    return min(inside, cluster.gpu.network * constants.network_efficiency * members)
