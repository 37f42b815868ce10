"""DistributedOptimizer under Horovod's TensorFlow name: for Keras optimizers, that of hvdkit.keras."""

from __future__ import annotations

import importlib
from typing import Any

from hvdkit.engine.compression import Coded
from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.engine.reduce_op import Average, ReduceOp
from hvdkit.tensorflow.compression import Compression, Compressor


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Coded = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a Keras optimizer step on the gradients of all ranks; see hvdkit.keras.DistributedOptimizer.

    use_locking: as in Horovod; accepted. Raises TypeError for an optimizer of TensorFlow 1: make a tf.keras one.
    """
    if not (isinstance(optimizer, str) or hasattr(optimizer, "apply")):
        raise TypeError(
            f"DistributedOptimizer() takes optimizers of tf.keras (Keras 3), not {type(optimizer).__name__}. Use one "
            f"of tf.keras.optimizers, or a DistributedGradientTape with any optimizer."
        )
    # hvdkit.keras stands above this floor: only who calls this needs it.
    return importlib.import_module("hvdkit.keras").DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
