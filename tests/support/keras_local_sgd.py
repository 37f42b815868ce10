"""Bodies for ranks that train with hvd.LocalSGD and hvd.DiLoCo of Keras."""

from __future__ import annotations

import logging
from typing import Any

import keras
import numpy as np
from keras_strategies import _INPUTS, _OUTPUTS, RATE, STEPS, _data, _start
from keras_training import ROWS, joined, raises
from numpy.typing import NDArray

import hvdkit.keras as hvd
from hvdkit.log import logger

Arrays = list[NDArray[Any]]


def _simulate(every: int, fragments: int, overlap: int, start_after: int) -> list[Arrays]:
    """What DiLoCo makes of a linear model on each rank, in numpy: its kernel, the larger, is the first fragment."""
    ranks = [[*_start(), *_data(rank)] for rank in range(hvd.size())]
    shared, velocity = _start(), [np.zeros(1), np.zeros(1)]
    under_way: list[tuple[int, int, Arrays, Arrays]] = []
    for step in range(1, STEPS + 1):
        local, gradients = step - start_after, []
        for kernel, bias, x, y in ranks:
            batch = slice((step - 1) * ROWS, step * ROWS)
            error = 2 * (x[batch] @ kernel + bias - y[batch]) / y[batch].size
            gradients.append([x[batch].T @ error, error.sum(0)])
        if local <= 0:
            gradients = [[np.mean([one[at] for one in gradients], axis=0) for at in range(2)]] * len(ranks)
        for state, gradient in zip(ranks, gradients, strict=True):
            state[:2] = [value - RATE * change for value, change in zip(state[:2], gradient, strict=True)]
        if local <= 0:
            shared = [value.copy() for value in ranks[0][:2]]
            continue
        for part in range(fragments):
            if (local - 1) % every + 1 == (part + 1) * every // fragments:
                for at in (0, 1) if fragments == 1 else (part,):
                    sent = [state[at].copy() for state in ranks]
                    under_way.append((step + overlap, at, sent, [value - shared[at] for value in sent]))
        for due, at, sent, changes in under_way:
            if due == step:
                change = np.mean(changes, axis=0)
                velocity[at] = 0.9 * velocity[at] + change
                shared[at] = shared[at] + 0.7 * (change + 0.9 * velocity[at])
                for state, before in zip(ranks, sent, strict=True):
                    state[at] = shared[at] + state[at] - before
        under_way = [each for each in under_way if each[0] > step]
    return [state[:2] for state in ranks]


def simulated(every: int, fragments: int, overlap: int, start_after: int) -> None:
    """DiLoCo in fit() is what numpy computes; synchronize_parameters() then makes the ranks equal."""
    with joined(check_replicas=2):
        model = keras.Sequential([keras.Input((_INPUTS,)), keras.layers.Dense(_OUTPUTS)])
        model.set_weights(_start())
        optimizer = hvd.DiLoCo(
            keras.optimizers.SGD(RATE), every=every, fragments=fragments, overlap=overlap, start_after=start_after
        )
        model.compile(optimizer, "mse")
        x, y = (array[: STEPS * ROWS].astype("float32") for array in _data(hvd.rank()))
        model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
        expected = _simulate(every, fragments, overlap, start_after)[hvd.rank()]
        for weight, simulated in zip(model.get_weights(), expected, strict=True):
            np.testing.assert_allclose(weight, simulated, rtol=0, atol=2e-6)
        optimizer.synchronize_parameters()
        weights = [np.array(weight) for weight in model.get_weights()]
        optimizer.synchronize_parameters()  # which changes nothing more
        for each in hvd.allgather_object(weights):
            for one, two, three in zip(weights, each, model.get_weights(), strict=True):
                np.testing.assert_array_equal(one, two)
                np.testing.assert_array_equal(one, three)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def in_particular() -> None:
    """What is refused and warned of; moving statistics; an elastic state."""
    with joined():
        rank, size = hvd.rank(), hvd.size()
        with raises(ValueError, "every is 0"):
            hvd.LocalSGD("sgd", every=0)
        with raises(TypeError, "Int8()"):
            hvd.DiLoCo("sgd", compression="int4")  # type: ignore[arg-type]

        model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        logger.addHandler(lines := _Lines())
        for optimizer in (hvd.LocalSGD("sgd"), hvd.LocalSGD("sgd", model=model, every=4)):
            model.compile(optimizer, "mse")
            optimizer.build(model.trainable_variables)
            keras.callbacks.CallbackList(model=model).on_train_begin()  # as fit() does
        logger.removeHandler(lines)
        found = [line for line in lines.lines if "BatchNormalization" in line]
        assert len(found) == (rank == 0 and size > 1), lines.lines
        assert not found or "model=model" in found[0]

        state = hvd.elastic.KerasState(model)
        state.sync()
        random = np.random.RandomState(rank)
        x, y = random.randn(6 * ROWS, 3).astype("float32"), random.randn(6 * ROWS, 1).astype("float32")
        model.fit(x, y, batch_size=ROWS, verbose=0)
        statistics = np.array(model.layers[0].moving_mean)
        optimizer.synchronize_parameters()
        mean = np.mean(hvd.allgather_object(statistics), axis=0)
        np.testing.assert_allclose(np.array(model.layers[0].moving_mean), mean, rtol=0, atol=1e-6)
        for weights in hvd.allgather_object([np.array(weight) for weight in model.get_weights()]):
            for one, two in zip(weights, model.get_weights(), strict=True):
                np.testing.assert_array_equal(one, two)

        # What was committed before the first step is there again, the strategy's part too.
        assert optimizer.strategy.steps == 6
        state.restore()
        assert optimizer.strategy.steps == 0
        model.fit(x, y, batch_size=ROWS, verbose=0)
        assert size == 1 or optimizer.strategy.steps == 6

        # Ranks that have taken different numbers of steps are told, also one that is in a meeting.
        with raises(Exception, "steps"):  # inside of a compiled step one of the backend
            model.fit(x[: (1 + rank) * ROWS], y[: (1 + rank) * ROWS], batch_size=ROWS, verbose=0)
            optimizer.synchronize_parameters()
