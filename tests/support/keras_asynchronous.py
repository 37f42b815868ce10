"""Bodies for ranks that train with hvd.AsynchronousOptimizer and hvd.BackupSteps of Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras_strategies import _INPUTS, _OUTPUTS, RATE, STEPS, _data, _start
from keras_training import ROWS, joined, raises

import hvdkit.keras as hvd
from hvdkit.errors import HorovodInternalError


def _model(optimizer: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((_INPUTS,)), keras.layers.Dense(_OUTPUTS)])
    model.set_weights(_start())
    model.compile(optimizer, "mse")
    return model


def _fit(model: keras.Model, data_of: int, steps: int, callbacks: Sequence[Any] = ()) -> None:
    x, y = (array[: steps * ROWS].astype("float32") for array in _data(data_of))
    model.fit(x, y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0, callbacks=[*callbacks])


def _assert_equal_ranks(model: keras.Model) -> None:
    mine = [np.array(weight) for weight in model.get_weights()]
    for weights in hvd.allgather_object(mine):
        for one, two in zip(mine, weights, strict=True):
            np.testing.assert_array_equal(one, two)


def uneven_steps() -> None:
    """Ranks take different numbers of steps in fit(), twice, and end alike; what they have learned is of all ranks."""
    with joined():
        rank = hvd.rank()
        model = _model(hvd.AsynchronousOptimizer(keras.optimizers.SGD(RATE), staleness=2, servers=hvd.size()))
        model.set_weights([weight + rank for weight in _start()])  # all go on from rank 0's
        for steps in (STEPS, STEPS - rank):
            _fit(model, 0, steps, [hvd.callbacks.MetricAverageCallback()])
            model.optimizer.finish()
            _assert_equal_ranks(model)
            assert all(np.isfinite(weight).all() for weight in model.get_weights())
        x, y = (array.astype("float32") for array in _data(0))
        assert float(np.mean((model.predict(x, verbose=0) - y) ** 2)) < float(np.mean((x @ _start()[0] - y) ** 2))
        with raises(TypeError, "no argument compression"):
            hvd.AsynchronousOptimizer("sgd", compression=hvd.Compression.fp16)
        with raises(ValueError, "at most servers"):
            hvd.AsynchronousOptimizer("sgd", servers=hvd.size() + 1)


def no_step() -> None:
    """A rank that takes no step of its own ends with what the others have learned; with backup steps all are told."""
    with joined():
        rank = hvd.rank()
        model = _model(hvd.AsynchronousOptimizer(keras.optimizers.SGD(RATE), staleness=2, servers=hvd.size()))
        if rank:
            with raises(ValueError, f"Rank {rank} has taken no step"):
                model.optimizer.finish()
            model.optimizer.build(model.trainable_variables)
        else:
            _fit(model, 0, STEPS)
        model.optimizer.finish()
        _assert_equal_ranks(model)
        assert np.abs(model.get_weights()[0] - _start()[0]).max() > 1e-3
        model = _model(hvd.BackupSteps(keras.optimizers.SGD(RATE), drop=1))
        if rank:
            model.optimizer.build(model.trainable_variables)
            with raises(HorovodInternalError, "has ended"):
                model.optimizer.finish()
        else:
            x, y = (array[:ROWS].astype("float32") for array in _data(0))
            with raises(Exception, "after 0 steps"):
                for _ in range(STEPS):
                    model.train_on_batch(x, y)  # no fit(), whose ranks agree when it begins
                model.optimizer.finish()


def as_one_process(kind: str) -> None:
    """With staleness 0, and with backup ranks that have the same data, fit() is that of one process."""
    with joined():
        optimizer = keras.optimizers.Adam(RATE, clipnorm=0.1)
        if kind == "staleness":
            optimizer = hvd.AsynchronousOptimizer(optimizer, staleness=0)
        else:
            optimizer = hvd.BackupSteps(optimizer, drop=1, ahead=2)
        model, alone = _model(optimizer), _model(keras.optimizers.Adam(RATE, clipnorm=0.1))
        for each in (model, alone):
            _fit(each, 0, STEPS)
        model.optimizer.finish()
        _assert_equal_ranks(model)
        for one, two in zip(model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(one, two, rtol=0, atol=2e-6)
