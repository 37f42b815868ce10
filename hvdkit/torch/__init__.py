"""hvdkit for PyTorch: `import hvdkit.torch as hvd` in place of `import horovod.torch as hvd`."""

from __future__ import annotations

from hvdkit.need import need

need("torch", "torch")

from hvdkit.errors import HorovodInternalError
from hvdkit.torch import data, learning_rate, metrics
from hvdkit.torch.basics import (
    barrier,
    cross_rank,
    cross_size,
    describe,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from hvdkit.torch.compression import Compression
from hvdkit.torch.ops import Average, Max, Min, Product, Sum, allgather, allreduce, allreduce_, broadcast, broadcast_
from hvdkit.torch.optimizer import DistributedOptimizer
from hvdkit.torch.state import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "data",
    "describe",
    "init",
    "is_initialized",
    "learning_rate",
    "local_rank",
    "local_size",
    "metrics",
    "rank",
    "shutdown",
    "size",
]
