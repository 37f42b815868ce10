"""A training with fit() whose end does not depend on how many ranks there are: they share each batch of 12.

Prints its process number, and at its end what it has come to. Arguments: epochs, seconds a batch, batches between
commits, and where there is a fourth, `shard` of the optimizer. Without a launcher it is what one process comes to that
nothing happens to.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import keras
import numpy as np

import hvdkit.keras as hvd

BATCHES, BATCH = 8, 12


def make_model(shard: str | None) -> Any:
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), shard=shard), "mse", jit_compile=False)
    return model


def rest_of_epoch(epoch: int, batch: int) -> tuple[Any, Any]:
    """This rank's part of each batch that is left."""
    inputs = np.random.default_rng(6).normal(size=(BATCHES * BATCH, 8))
    order = np.random.default_rng(epoch).permutation(len(inputs)).reshape(BATCHES, BATCH)[batch:]
    mine = inputs[order[:, hvd.rank() :: hvd.size()].reshape(-1)]
    return mine, np.sin(mine.sum(1, keepdims=True))


class Slowly(keras.callbacks.Callback):
    """A batch takes so long; tells of commits, which have come before."""

    def __init__(self, state: Any, pause_s: float) -> None:
        super().__init__()
        self._state, self._pause_s = state, pause_s

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(self._pause_s)
        if hvd.rank() == 0:
            print(f"committed {self._state.epoch * BATCHES + self._state.batch}", flush=True)


def main(epochs: int, pause_s: float, commit_every: int, shard: str | None = None) -> None:
    hvd.init()
    model = make_model(shard)
    state = hvd.elastic.KerasState(model, epoch=0, batch=0, sizes=[])
    print(f"pid {os.getpid()}", flush=True)

    @hvd.elastic.run
    def train(state: Any) -> None:
        state.sizes.append(hvd.size())
        while state.epoch < epochs:
            model.fit(
                *rest_of_epoch(state.epoch, state.batch),
                batch_size=BATCH // hvd.size(),
                initial_epoch=state.epoch,
                epochs=state.epoch + 1,
                shuffle=False,
                verbose=0,
                callbacks=[
                    hvd.elastic.UpdateBatchStateCallback(state),
                    hvd.elastic.UpdateEpochStateCallback(state),
                    hvd.elastic.CommitStateCallback(state, commit_every),
                    Slowly(state, pause_s),
                ],
            )

    train(state)
    kept: dict[str, Any] = {}
    if hasattr(model.optimizer, "gather_state"):
        model.optimizer.gather_state()
    model.optimizer.save_own_variables(kept)
    summary = [float(np.sum(one)) for one in [*model.get_weights(), *kept.values()]]
    alike = len(set(map(tuple, hvd.allgather_object(summary)))) == 1
    if hvd.rank() == 0:
        print(json.dumps({"summary": summary, "alike": alike, "sizes": state.sizes}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
