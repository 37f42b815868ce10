"""A Keras script for one process: a training on each kind of data; rank 0 says what each ends with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

BATCH, ROWS = 16, 67
OUT = sys.argv[1]

keras.utils.set_random_seed(1)
generator = np.random.RandomState(0)
x, y = generator.randn(ROWS, 6).astype("float32"), generator.randint(0, 3, ROWS)


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return x[rows], y[rows]


def train(number: int, give: Callable[..., Any]) -> None:
    keras.utils.set_random_seed(number)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    writes = keras.callbacks.ModelCheckpoint(f"{OUT}.{number}.keras")
    stops = keras.callbacks.EarlyStopping("val_loss", patience=3)
    options = {"epochs": 2, "verbose": 0, "shuffle": False, "callbacks": [writes, stops]}
    given = give()
    model.fit(
        *given, validation_data=(x[:20], y[:20]), **(options if len(given) == 1 else {**options, "batch_size": BATCH})
    )
    loaded = keras.saving.load_model(f"{OUT}.{number}.keras")
    end = [float(np.abs(one - two).max()) for one, two in zip(model.get_weights(), loaded.get_weights(), strict=True)]
    print(number, " ".join(f"{np.abs(one).sum():.5f}" for one in model.get_weights()), max(end) < 1e-7)
    print(number, f"{model.evaluate(x, y, verbose=0)[0]:.5f}")


kinds: list[Callable[..., Any]] = [lambda: (x, y), lambda: (Batches(),)]
if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    kinds.append(lambda: (tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH),))
for at, kind in enumerate(kinds):
    train(at, kind)
