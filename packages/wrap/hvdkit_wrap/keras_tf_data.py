"""This rank's rows of the batches of a tf.data.Dataset."""

from __future__ import annotations

from typing import Any


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
        weight = tf.where(split, tf.cast(size * (after - first), tf.float32) / tf.cast(count, tf.float32), 1.0)
        weights = tf.fill([after - first], weight)
        return (*mine[:2], weights if len(mine) < 3 else tf.cast(mine[2], tf.float32) * weights)

    return data.map(part, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).prefetch(tf.data.AUTOTUNE)
