"""`hvdkit.tensorflow.DistributedOptimizer`: that of hvdkit.keras, with the arguments of Horovod's for TensorFlow."""

from __future__ import annotations

from typing import Any, cast

from hvdkit.engine.compression import Coded
from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.engine.reduce_op import Average, ReduceOp
from hvdkit.engine.strategy import Strategy
from hvdkit.keras.optimizer import DistributedOptimizer as distribute
from hvdkit.tensorflow import session_optimizer
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
    strategy: Strategy | None = None,
    shard: str | None = None,
) -> Any:
    """Make a Keras optimizer step on the gradients of all ranks; see hvdkit.keras.DistributedOptimizer.

    Also accepts an optimizer of tf.compat.v1.train, for graphs and sessions, with the arguments compression,
    sparse_as_dense, op, gradient_predivide_factor and process_set; ValueError for others.
    use_locking: accepted as in Horovod. Raises TypeError for an optimizer of another kind.
    """
    if session_optimizer.is_session_optimizer(optimizer):
        return session_optimizer.distribute(
            optimizer,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            process_set=process_set,
            unsupported={
                "backward_passes_per_step": backward_passes_per_step != 1,
                "strategy": strategy is not None,
                "shard": shard is not None,
            },
        )
    if not (isinstance(optimizer, str) or hasattr(optimizer, "apply")):
        raise TypeError(
            f"DistributedOptimizer() takes optimizers of tf.keras (Keras 3) and of tf.compat.v1.train, not "
            f"{type(optimizer).__name__}. Use an optimizer of tf.keras.optimizers, or hvd.DistributedGradientTape() "
            f"with any optimizer."
        )
    return distribute(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=cast(Any, compression),  # recognized by its dtype
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        strategy=strategy,
        shard=shard,
    )
