"""hvdkit for PyTorch: `import hvdkit.torch as hvd` in place of `import horovod.torch as hvd`."""

from __future__ import annotations

from hvdkit.need import need

need("torch", "torch")

from hvdkit.errors import HorovodInternalError
from hvdkit.torch import data, elastic, learning_rate, metrics
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
from hvdkit.torch.built import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from hvdkit.torch.compression import Compression
from hvdkit.torch.ops import Average, Max, Min, Product, Sum, allgather, allreduce, allreduce_, broadcast, broadcast_
from hvdkit.torch.optimizer import DistributedOptimizer
from hvdkit.torch.state import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from hvdkit.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "Product",
    "Sum",
    "SyncBatchNorm",
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
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "data",
    "ddl_built",
    "describe",
    "elastic",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "learning_rate",
    "local_rank",
    "local_size",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
]
