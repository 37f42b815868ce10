"""A Keras script whose steps are as long as the learning rate, and then what fit() and compile() cannot be given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from hvdkit.errors import WrapError

ones, zeros = np.ones((80, 1), "float32"), np.zeros((80, 1), "float32")
steps: list[float] = []


class Watch(keras.callbacks.Callback):
    def on_train_begin(self, logs: Any = None) -> None:
        self.before = self.model.get_weights()[0].item()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now = self.model.get_weights()[0].item()
        steps.append(self.before - now)
        self.before = now


def make(**options: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    settings = {"optimizer": keras.optimizers.SGD(0.1), "loss": lambda wanted, given: given - wanted}
    model.compile(**{**settings, **options})
    return model


model = make()
for epochs in (2, 1):  # a second fit() is not warmed up again
    model.fit(ones, zeros, batch_size=5, epochs=epochs, verbose=0, callbacks=[Watch()])
print(" ".join(f"{step:.5f}" for step in steps))

schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
restore = keras.callbacks.BackupAndRestore("backup")
attempts: list[Callable[[], object]] = [
    lambda: make().fit((pair for pair in [(ones, zeros)]), verbose=0),
    lambda: make().fit(ones, zeros, callbacks=[restore], verbose=0),
    lambda: make(loss=keras.losses.MeanSquaredError(reduction="sum")).fit(ones, zeros, verbose=0),
    lambda: make(optimizer=keras.optimizers.SGD(schedule)),
]


def say(attempt: Callable[[], object]) -> None:
    try:
        attempt()
    except WrapError as error:
        print("refused:", error)
    else:
        print("went on")


for attempt in attempts:
    say(attempt)
