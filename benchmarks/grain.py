"""What a grain of the rows costs and saves where each number of rows is a program to compile, as in Keras on JAX.

    KERAS_BACKEND=jax python -m benchmarks.grain

Simulated: three ranks of speeds 1, 1 and 1/3, a batch of 768 rows, 400 exchanges of measured times with noise; means of
10 runs. Then measured: the first step of a small convolutional network with another number of rows, and steps after it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import keras
import numpy as np
from keras import layers

from hvdkit.balance.shares import Balance, step_s

_ROWS, _EXCHANGES, _RUNS = 768, 400, 10


def main() -> None:
    """Print both tables."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| noise | grain | changes of the plan | with a compilation | step, of the ideal |\n|---|---|---|---|---|")
    for noise in (0.03, 0.1, 0.3):
        for grain in (1, _ROWS // 32, _ROWS // 8):
            runs = [_simulate(noise, grain, seed) for seed in range(_RUNS)]
            changes, compilations, step = (statistics.mean(column) for column in zip(*runs, strict=True))
            print(f"| {noise:.0%} | {grain} | {changes:.0f} | {compilations:.0f} | x{step:.2f} |")
    model = keras.Sequential([keras.Input((8, 8, 1))])
    for width in (32, 64):
        model.add(layers.Conv2D(width, 3, padding="same", activation="relu"))
        model.add(layers.MaxPooling2D())
    for layer in (layers.Flatten(), layers.Dense(128, activation="relu"), layers.Dense(10)):
        model.add(layer)
    model.compile("adam", "mse")
    for rows in (32, 33, 34):
        first, *others = [_step(model, rows) for _ in range(8)]
        print(f"{rows} rows: first step {first:.2f} s, then {1e3 * statistics.median(others):.1f} ms")


def _simulate(noise: float, grain: int, seed: int) -> tuple[int, int, float]:
    """Changes of the plan, those in which a rank gets a number of rows for the first time, and the step's length."""
    draw, row_s = random.Random(seed), (1.0, 1.0, 3.0)
    speeds = [1 / each for each in row_s]
    balance = Balance(_ROWS, len(row_s), None, grain)
    compiled = [{rows} for rows in balance.plan]
    changes, compilations, steps = 0, 0, []
    for _ in range(_EXCHANGES):
        if balance.add_times([each * (1 + abs(draw.gauss(0, noise))) for each in row_s]):
            changes += 1
            compilations += any(rows not in known for rows, known in zip(balance.plan, compiled, strict=True))
            for rows, known in zip(balance.plan, compiled, strict=True):
                known.add(rows)
        steps.append(step_s(balance.plan, speeds) / (_ROWS / sum(speeds)))
    return changes, compilations, statistics.mean(steps)


def _step(model: Any, rows: int) -> float:
    images, targets = np.ones((rows, 8, 8, 1), "float32"), np.ones((rows, 10), "float32")
    began = time.perf_counter()
    float(model.train_on_batch(images, targets))
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
