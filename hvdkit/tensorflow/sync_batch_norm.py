"""SyncBatchNormalization: batch statistics over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdkit.engine.basics import size
from hvdkit.engine.reduce_op import Sum
from hvdkit.tensorflow.ops import allreduce


@tf.keras.utils.register_keras_serializable("hvdkit")
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """Keras's BatchNormalization, with mean and variance over all ranks' batches in training; sizes may differ.

    Needs Keras's TensorFlow backend (ValueError otherwise). Call hvd.init() before the layer is used in training. A
    model with this layer is not compiled by XLA. fused: as in Horovod, must not be True.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused:
            raise ValueError("SyncBatchNormalization does not support fused=True. Remove the argument.")
        if tf.keras.config.backend() != "tensorflow":
            raise ValueError(
                f"hvdkit.tensorflow.SyncBatchNormalization needs Keras on TensorFlow; the backend is "
                f"{tf.keras.config.backend()}. Set KERAS_BACKEND=tensorflow before keras is imported."
            )
        super().__init__(**kwargs)
        self.supports_jit = False

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, mask)
        if size() == 1:
            return mean, variance
        count = tf.cast(self._count(inputs, mask), mean.dtype)
        sums = allreduce(tf.concat([mean * count, [count]], 0), op=Sum)
        total = tf.maximum(sums[-1], 1)
        all_mean = sums[:-1] / total
        # Variances around the common mean: for values far from zero, squares would lose the digits of a variance.
        spread = allreduce((variance + tf.square(mean - all_mean)) * count, op=Sum)
        return all_mean, spread / total

    def _count(self, inputs: Any, mask: Any) -> Any:
        """Return the number of values per channel on this rank."""
        shape = tf.shape(inputs)
        if mask is None:
            return tf.size(inputs) // shape[self.axis]
        return tf.reduce_sum(tf.cast(tf.broadcast_to(tf.expand_dims(mask, -1), shape), tf.int32)) // shape[self.axis]
