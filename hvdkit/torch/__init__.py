"""hvdkit for PyTorch: `import hvdkit.torch as hvd` in place of `import horovod.torch as hvd`."""

from __future__ import annotations

from hvdkit.optional_import import optional_import

optional_import("torch", "torch")

from hvdkit.engine.basics import (
    add_process_set,
    cross_rank,
    cross_size,
    get_process_set_ids_and_ranks,
    get_process_sets,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from hvdkit.engine.built import (
    ccl_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
)
from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.engine.reduce_op import Adasum, Average, Max, Min, Product, Sum
from hvdkit.errors import HorovodInternalError
from hvdkit.profiling.session import profile, scaling_report
from hvdkit.strategies.outer import OuterSGD
from hvdkit.torch import checkpoint, data, elastic, learning_rate, metrics, mpi_ops
from hvdkit.torch.asynchronous import AsynchronousOptimizer
from hvdkit.torch.backup_steps import BackupSteps
from hvdkit.torch.basics import cuda_built, describe, init, local_device, rocm_built
from hvdkit.torch.compression import Compression
from hvdkit.torch.functions import allgather_object, broadcast_object
from hvdkit.torch.local_sgd import DiLoCo, LocalSGD
from hvdkit.torch.ops import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from hvdkit.torch.optimizer import DistributedOptimizer
from hvdkit.torch.optimizer import _DistributedOptimizer as _DistributedOptimizer
from hvdkit.torch.process_group.register import register
from hvdkit.torch.reduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from hvdkit.torch.state import broadcast_optimizer_state, broadcast_parameters
from hvdkit.torch.sync_batch_norm import SyncBatchNorm
from hvdkit.tracking.progress import progress
from hvdkit.tracking.tracker import track

register()

__all__ = [
    "Adasum",
    "AsynchronousOptimizer",
    "Average",
    "BackupSteps",
    "Compression",
    "DiLoCo",
    "DistributedOptimizer",
    "HorovodInternalError",
    "LocalSGD",
    "Max",
    "Min",
    "OuterSGD",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "checkpoint",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "data",
    "ddl_built",
    "describe",
    "elastic",
    "get_process_set_ids_and_ranks",
    "get_process_sets",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "learning_rate",
    "local_device",
    "local_rank",
    "local_size",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_ops",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "profile",
    "progress",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "scaling_report",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
    "track",
]
