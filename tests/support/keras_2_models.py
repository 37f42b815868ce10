"""Models saved by Keras 2, and what they come to when they go on training: tests/data/golden/keras_2_models.zip.

Written by `TF_USE_LEGACY_KERAS=1 python tests/support/keras_2_models.py` with tf_keras 2.21.0, which is Keras 2 with
its optimizers of before 2.11 (`optimizers.legacy`) and of since then.
"""

from __future__ import annotations

import importlib
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MODELS = Path(__file__).parents[1] / "data" / "golden" / "keras_2_models.zip"
#: By name: optimizers.legacy or optimizers, class, options.
OPTIMIZERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "2.10 Adam": ("legacy", "Adam", {"amsgrad": True}),
    "2.10 SGD": ("legacy", "SGD", {"momentum": 0.9, "nesterov": True}),
    "2.10 RMSprop": ("legacy", "RMSprop", {"momentum": 0.9, "centered": True}),
    "2.10 Adamax": ("legacy", "Adamax", {}),
    "2.10 Adadelta": ("legacy", "Adadelta", {}),
    "2.11 Adam": ("", "Adam", {"amsgrad": True, "clipnorm": 1.0}),
    "2.11 AdamW": ("", "AdamW", {}),
    "2.11 SGD": ("", "SGD", {}),
    "2.11 RMSprop": ("", "RMSprop", {"momentum": 0.9, "centered": True}),
    "2.11 Adamax": ("", "Adamax", {}),
    "2.11 Ftrl": ("", "Ftrl", {}),
}
BATCH = 8


def data() -> tuple[NDArray[Any], NDArray[Any]]:
    """What they are trained on, in this order."""
    random = np.random.RandomState(0)
    return random.randn(24, 4).astype("float32"), random.randint(0, 3, 24)


def write() -> None:
    """Train each for two epochs, save it, and train it for two more."""
    keras = importlib.import_module("tf_keras")
    with zipfile.ZipFile(MODELS, "w", zipfile.ZIP_DEFLATED) as archive, tempfile.TemporaryDirectory() as folder:
        for name, (module, kind, options) in OPTIMIZERS.items():
            keras.utils.set_random_seed(0)
            layers = keras.layers
            inputs = keras.Input((4,))
            hidden = layers.BatchNormalization()(layers.Dense(3, activation="tanh")(inputs))
            model = keras.Model(inputs, layers.Dense(3)(hidden))
            optimizers = keras.optimizers.legacy if module else keras.optimizers
            rate = 0.01
            if kind == "SGD":
                rate = keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.5)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(getattr(optimizers, kind)(learning_rate=rate, **options), loss, metrics=["accuracy"])
            path = str(Path(folder, "model.h5"))
            model.fit(*data(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
            model.save(path)
            archive.write(path, f"{name}.h5")
            model.fit(*data(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
            path = str(Path(folder, "after.npz"))
            np.savez(path, *model.get_weights())
            archive.write(path, f"{name}.npz")


if __name__ == "__main__":
    write()
