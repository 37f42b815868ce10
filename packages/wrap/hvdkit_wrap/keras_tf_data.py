"""This rank's rows of the batches of a tf.data.Dataset."""

from __future__ import annotations

from typing import Any

from hvdkit_wrap.keras_weights import pack


def split_tf_data(data: Any, *, rank: int, size: int, weighs: bool) -> Any:
    """Return the dataset with this rank's rows of each batch; all ranks get a whole batch with fewer rows than ranks.

    weighs: add weights of the samples to (x, y) and (x, y, weights), so that the average over ranks of means over
    unequal parts is the mean over the batch.
    """
    import tensorflow as tf

    def part(*element: Any) -> Any:
        count = tf.shape(tf.nest.flatten(element)[0])[0]
        split = count >= size
        first = tf.where(split, count * rank // size, 0)
        after = tf.where(split, count * (rank + 1) // size, count)
        mine = tf.nest.map_structure(lambda one: one[first:after], element)
        if len(element) == 1:
            return mine[0]
        if not weighs:
            return mine
        rows, whole = tf.cast(after - first, tf.float32), tf.cast(count, tf.float32)
        mean = tf.fill([after - first], tf.where(split, size * rows / whole, 1.0))
        here = tf.fill([after - first], tf.where(split, 1.0, 1.0 / size))
        own = here if len(mine) < 3 else tf.nest.map_structure(lambda one: tf.cast(one, tf.float32) * here[0], mine[2])
        return (*mine[:2], pack(own, mean, here))

    return data.map(part, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).prefetch(tf.data.AUTOTUNE)
