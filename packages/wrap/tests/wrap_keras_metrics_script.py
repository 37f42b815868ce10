"""A Keras script at learning rate 0: what fit() logs and what evaluate() returns are then the same, on each data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

BATCH = 4
keras.utils.set_random_seed(1)
generator = np.random.RandomState(0)
x = generator.randn(50, 6).astype("float32")  # the last batch has fewer rows than ranks
y = (x.sum(1) > 0).astype("int32")
weights = generator.rand(50).astype("float32") + 0.1


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return -(-len(x) // BATCH)

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return x[rows], y[rows], weights[rows]


def arrays(**options: Any) -> dict[str, Any]:
    return {"x": x, "y": y, "batch_size": BATCH, **options}


kinds: list[Callable[[], dict[str, Any]]] = [
    arrays,
    lambda: arrays(sample_weight=weights),
    lambda: {"x": Batches(workers=0)},
]
if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    kinds.append(lambda: {"x": tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(BATCH)})
for kind in kinds:
    keras.utils.set_random_seed(2)
    penalty = keras.regularizers.L2(0.1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, "softmax", kernel_regularizer=penalty)])
    metrics = [keras.metrics.SparseCategoricalAccuracy(name="right")]
    model.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy", weighted_metrics=metrics)
    logged = model.fit(**kind(), shuffle=False, verbose=0).history
    whole = model.evaluate(**kind(), verbose=0, return_dict=True)
    print(*(f"{number:.6f}" for name in ("loss", "right") for number in (logged[name][0], whole[name])))
