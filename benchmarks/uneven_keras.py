"""The training of benchmarks.uneven in Keras: steps of fit(), before each of which a callback sleeps for its rows."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np

import hvdkit.keras as hvd


class Training:
    """See benchmarks.uneven.Training."""

    def __init__(self, batch: int, row_s: float, every: int) -> None:
        keras.utils.set_random_seed(0)
        if keras.backend.backend() == "torch":
            import torch

            torch.set_num_threads(1)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
        self._model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
        self._model.compile(optimizer, "mse")
        rows = np.random.randn(batch * 50, 64).astype("float32")
        self._data = hvd.BalancedDataset((rows, rows), batch, optimizer, every=every)
        self._pace = _Pace(self._data, row_s)

    @property
    def plan(self) -> tuple[int, ...]:
        return self._data.plan

    def steps(self, count: int) -> list[float]:
        self._model.fit(self._data, steps_per_epoch=count, verbose=0, callbacks=[self._pace])
        return np.diff(self._pace.times).tolist()


class _Pace(keras.callbacks.Callback):
    """Sleeps for the rows of each step, and keeps when steps began, and the last one ended."""

    def __init__(self, data: hvd.BalancedDataset, row_s: float) -> None:
        super().__init__()
        self._data, self._row_s = data, row_s

    def on_train_begin(self, logs: Any = None) -> None:
        self.times: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.times.append(time.perf_counter())
        time.sleep(self._row_s * self._data.plan[hvd.rank()])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.times.append(time.perf_counter())
