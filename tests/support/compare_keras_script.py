"""A training in Keras for `hvdkit compare`: python compare_keras_script.py [sum] [batch-norm]."""

from __future__ import annotations

import sys

from without_tensorflow import hide_tensorflow

hide_tensorflow()

import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import layers  # noqa: E402

import hvdkit.keras as hvd  # noqa: E402


def train(planted: set[str]) -> None:
    """Two epochs of a small network with a warm-up, on numbers of no meaning."""
    hvd.init()
    keras.backend.clear_session()  # in ranks that have made a network before, this one's tensors would have other names
    keras.utils.set_random_seed(hvd.rank())
    numbers = np.random.RandomState(0)
    data = numbers.rand(64, 6).astype("float32"), numbers.rand(64, 1).astype("float32")
    middle = layers.BatchNormalization() if "batch-norm" in planted else layers.Dropout(0.3)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(16, "tanh"), middle, layers.Dense(1)])
    rate = 0.05 * hvd.size()
    op = hvd.Sum if "sum" in planted else hvd.Average
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9), op=op), "mse")
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2),
    ]
    model.fit(*hvd.shard(data), batch_size=8, epochs=2, callbacks=callbacks, verbose=0)


if __name__ == "__main__":
    train(set(sys.argv[1:]))
