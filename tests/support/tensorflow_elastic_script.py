"""As keras_elastic_script.py, in a loop of TensorFlow: a tf.function, traced once, dense and sparse gradients."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf

import hvdkit.tensorflow as hvd

BATCH, SAMPLES = 12, 96

_random = np.random.default_rng(5)
inner = tf.Variable(_random.normal(size=(8, 16)), name="inner")
outer = tf.Variable(_random.normal(size=(16, 1)), name="outer")
table = tf.Variable(_random.normal(size=(10, 1)), name="table")
speed = [tf.Variable(tf.zeros_like(one)) for one in (inner, outer)]  # a momentum, so that there is more to be kept
step = tf.Variable(0)


def _learn(inputs: Any, words: Any, wanted: Any) -> None:
    with tf.GradientTape() as tape:
        found = tf.tanh(inputs @ inner) @ outer + tf.gather(table, words)
        loss = tf.reduce_mean(tf.square(found - wanted))
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, [inner, outer, table])
    for variable, moving, gradient in zip((inner, outer), speed, gradients[:2], strict=True):
        moving.assign(0.9 * moving + gradient)
        variable.assign_sub(0.01 * moving)
    table.scatter_sub(tf.IndexedSlices(0.01 * gradients[2].values, gradients[2].indices))
    step.assign_add(1)


learn: Any = tf.function(_learn)


def part_of(number: int) -> tuple[Any, Any, Any]:
    inputs = np.random.default_rng(6).normal(size=(SAMPLES, 8))
    words = np.arange(SAMPLES) % 10
    rows = np.random.default_rng(number).permutation(SAMPLES)[:BATCH][hvd.rank() :: hvd.size()]
    return tuple(map(tf.constant, (inputs[rows], words[rows], np.sin(inputs[rows].sum(1, keepdims=True)))))


def main(steps: int, pause_s: float, commit_every: int) -> None:
    hvd.init()
    state = hvd.elastic.TensorFlowState([inner, outer, table, *speed, step], sizes=[])
    print(f"pid {os.getpid()}", flush=True)

    @hvd.elastic.run
    def train(state: Any) -> None:
        state.sizes.append(hvd.size())
        while step.numpy() < steps:
            learn(*part_of(int(step.numpy())))
            time.sleep(pause_s)
            if step.numpy() % commit_every == 0:
                state.commit()
                if hvd.rank() == 0:
                    print(f"committed {step.numpy()}", flush=True)
        while hvd.size() < max(state.sizes):  # a replacement takes as long as it takes
            state.commit()
            time.sleep(0.05)

    train(state)
    summary = [float(one.numpy().sum()) for one in state.variables]
    alike = len(set(map(tuple, hvd.allgather_object(summary)))) == 1
    if hvd.rank() == 0:
        print(json.dumps({"summary": summary, "alike": alike, "sizes": state.sizes}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
