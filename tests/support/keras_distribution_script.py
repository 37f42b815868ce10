"""Train the example's model in Keras' distribution, data parallel and then divided, and write the weights.

Usage: keras_distribution_script.py FOLDER PARTS...; each rank writes RANK-PARTS.npz with all weights, and the shape of
the hidden kernel that it holds. With "1" alone and without a launcher: one process, whole batches.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import keras_distribution as example
import numpy as np

import hvdkit.keras as hvd

BATCH, STEPS = 48, 6


def main(folder: str, *numbers: str) -> None:
    hvd.distribution.initialize()
    import jax
    import keras
    from jax.experimental import multihost_utils

    assert jax.process_count() == hvd.size() and jax.process_index() == hvd.rank()
    images, _, labels, _ = example.read_digits()
    images, labels = images[: BATCH * STEPS], labels[: BATCH * STEPS]
    for parts in map(int, numbers):
        keras.utils.set_random_seed(0)
        keras.distribution.set_distribution(example.make_distribution(parts))
        groups = hvd.size() // parts
        mine = hvd.shard((images, labels), rank=hvd.rank() // parts, size=groups)
        model = example.make_model()
        if parts > 1:
            hvd.distribution.check_layout(model)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
        model.fit(*mine, batch_size=BATCH // groups, shuffle=False, verbose=0)
        weights = [np.asarray(multihost_utils.process_allgather(each.value, tiled=True)) for each in model.weights]
        held = model.get_layer("hidden").kernel.value.addressable_shards[0].data.shape
        np.savez(Path(folder) / f"{hvd.rank()}-{parts}.npz", *weights, held=np.array(held))


if __name__ == "__main__":
    main(*sys.argv[1:])
