"""hvdkit for Keras 3, on TensorFlow, PyTorch or JAX: `import hvdkit.keras as hvd`.

In place of `import horovod.keras as hvd` and `import horovod.tensorflow.keras as hvd`. The backend is what Keras is
set to: KERAS_BACKEND, or its configuration file.
"""

from __future__ import annotations

from hvdkit.optional_import import optional_import

optional_import("keras", "keras")

from hvdkit.engine.basics import (
    add_process_set,
    cross_rank,
    cross_size,
    get_process_set_ids_and_ranks,
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
from hvdkit.keras import callbacks, checkpoint, distribution, elastic, validation
from hvdkit.keras.asynchronous import AsynchronousOptimizer
from hvdkit.keras.averages import average_metrics, evaluate
from hvdkit.keras.backup_steps import BackupSteps
from hvdkit.keras.balanced_dataset import BalancedDataset
from hvdkit.keras.basics import cuda_built, describe, init, rocm_built
from hvdkit.keras.callbacks import fit_agreement
from hvdkit.keras.compression import Compression
from hvdkit.keras.data import shard
from hvdkit.keras.distributed import watch_loss_scale
from hvdkit.keras.local_sgd import DiLoCo, LocalSGD
from hvdkit.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from hvdkit.keras.saved_models import load_model
from hvdkit.keras.sharding.optimizer import refuse_swaps
from hvdkit.keras.state import (
    allgather_object,
    broadcast_global_variables,
    broadcast_model,
    broadcast_object,
    broadcast_variables,
)
from hvdkit.keras.values import allgather, allreduce, barrier, broadcast, reducescatter
from hvdkit.profiling.session import profile, scaling_report
from hvdkit.strategies.outer import OuterSGD
from hvdkit.tracking.progress import progress
from hvdkit.tracking.tracker import track
from hvdkit.training.schedules import linear_scale, square_root_scale

watch_loss_scale()
refuse_swaps()
fit_agreement.install()
validation.install()

__all__ = [
    "Adasum",
    "AsynchronousOptimizer",
    "Average",
    "BackupSteps",
    "BalancedDataset",
    "Compression",
    "DiLoCo",
    "DistributedOptimizer",
    "HorovodInternalError",
    "LocalSGD",
    "Max",
    "Min",
    "OuterSGD",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "average_metrics",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_model",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "checkpoint",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "describe",
    "distribution",
    "elastic",
    "evaluate",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "linear_scale",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "profile",
    "progress",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "scaling_report",
    "shard",
    "shutdown",
    "size",
    "square_root_scale",
    "start_timeline",
    "stop_timeline",
    "track",
]
