"""hvdkit for TensorFlow: `import hvdkit.tensorflow as hvd` in place of `import horovod.tensorflow as hvd`.

Modules that need Keras (DistributedOptimizer, SyncBatchNormalization, keras, elastic) are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hvdkit.optional_import import optional_import

optional_import("tensorflow", "tensorflow")

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
from hvdkit.tensorflow import mpi_ops
from hvdkit.tensorflow.basics import cuda_built, describe, gpu_available, init, rocm_built
from hvdkit.tensorflow.compression import Compression
from hvdkit.tensorflow.ops import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    reducescatter,
)
from hvdkit.tensorflow.session_optimizer import BroadcastGlobalVariablesHook, broadcast_global_variables
from hvdkit.tensorflow.state import allgather_object, broadcast_object, broadcast_object_fn, broadcast_variables
from hvdkit.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from hvdkit.tensorflow.world_ops import local_rank_op, local_size_op, process_set_included_op, rank_op, size_op
from hvdkit.tracking.progress import progress
from hvdkit.tracking.tracker import track

if TYPE_CHECKING:
    from hvdkit.keras.tensorflow_optimizer import DistributedOptimizer
    from hvdkit.tensorflow import elastic
    from hvdkit.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "describe",
    "elastic",
    "get_process_set_ids_and_ranks",
    "get_process_sets",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_ops",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "profile",
    "progress",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "scaling_report",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
    "track",
]

_LATER = {
    "DistributedOptimizer": "hvdkit.keras.tensorflow_optimizer",
    "SyncBatchNormalization": "hvdkit.tensorflow.sync_batch_norm",
    "elastic": "",
    "keras": "",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not _LATER[name]:
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module(_LATER[name]), name)
