"""A loop of its own with Keras on PyTorch, whose optimizer has no variables before its first step.

Prints its process number, and at its end what it has come to. Arguments: steps in the third world, seconds a
step, steps between commits.
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

BATCH = 12


def main(steps: int, pause_s: float, commit_every: int) -> None:
    hvd.init()
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    state = hvd.elastic.KerasState(model, step=0, sizes=[], left=steps)
    print(f"pid {os.getpid()}", flush=True)

    @hvd.elastic.run
    def train(state: Any) -> None:
        state.sizes.append(hvd.size())
        while state.left:
            inputs = np.random.default_rng(state.step).normal(size=(BATCH, 8))[hvd.rank() :: hvd.size()]
            model.zero_grad()
            wanted = keras.ops.convert_to_tensor(np.sin(inputs.sum(1, keepdims=True)))
            loss = keras.ops.mean((model(inputs) - wanted) ** 2)
            loss.backward()
            weights = model.trainable_weights
            optimizer.apply([weight.value.grad for weight in weights], weights)
            state.step += 1
            state.left -= len(state.sizes) == 3
            time.sleep(pause_s)
            if state.step % commit_every == 0:
                state.commit()
                if hvd.rank() == 0:
                    print(f"committed {state.step}", flush=True)

    train(state)
    summary = [float(keras.ops.convert_to_numpy(one).sum()) for one in model.weights]
    alike = len(set(map(tuple, hvd.allgather_object(summary)))) == 1
    if hvd.rank() == 0:
        print(json.dumps({"summary": summary, "alike": alike, "sizes": state.sizes}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
