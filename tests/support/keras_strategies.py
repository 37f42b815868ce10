"""Bodies for ranks that train with Keras and a strategy of their own."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from averaging import LateAverage, NamedAverage, PeriodicAverage
from keras_training import ROWS, _gradients, assert_alike, joined, make_data, make_model, mine, raises
from numpy.typing import NDArray

import hvdkit.keras as hvd
from hvdkit.engine.allreduce import AllReduce
from hvdkit.engine.groups import Group
from hvdkit.engine.planned.values import ParameterValues
from hvdkit.engine.strategy import Parameters

RATE, EVERY, STEPS = 0.05, 3, 8
_INPUTS, _OUTPUTS = 12, 5


def _simulate(passes: int) -> list[list[NDArray[Any]]]:
    """What local SGD makes of a linear model on each rank, in numpy."""
    rows = STEPS * passes * ROWS
    ranks = []
    for rank in range(hvd.size()):
        x, y = _data(rank)
        assert len(x) == len(y) >= rows
        ranks.append([*_start(), x, y])
    for step in range(STEPS):
        for state in ranks:
            kernel, bias, x, y = state
            batch = slice(step * passes * ROWS, (step + 1) * passes * ROWS)
            error = 2 * (x[batch] @ kernel + bias - y[batch]) / y[batch].size
            state[0], state[1] = kernel - RATE * x[batch].T @ error, bias - RATE * error.sum(0)
        if (step + 1) % EVERY == 0:
            means = [np.mean([state[index] for state in ranks], axis=0) for index in range(2)]
            for state in ranks:
                state[:2] = means
    return [state[:2] for state in ranks]


def _start() -> list[NDArray[Any]]:
    random = np.random.RandomState(3)
    return [random.randn(_INPUTS, _OUTPUTS), random.randn(_OUTPUTS)]


def _data(rank: int) -> tuple[NDArray[Any], NDArray[Any]]:
    random = np.random.RandomState(10 + rank)
    return random.randn(100, _INPUTS), random.randn(100, _OUTPUTS)


def periodic(passes: int, scaled: bool) -> None:
    """Parameters that are averaged every few steps, as in numpy; steps are counted without passes of a window.

    scaled: the loss is, by an optimizer around the wrapped one.
    """
    with joined(check_replicas=2):
        model = keras.Sequential([keras.Input((_INPUTS,)), keras.layers.Dense(_OUTPUTS)])
        model.set_weights(_start())
        optimizer: Any = keras.optimizers.SGD(RATE, gradient_accumulation_steps=passes if passes > 1 else None)
        optimizer = hvd.DistributedOptimizer(optimizer, strategy=PeriodicAverage(EVERY))
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**10)
        model.compile(optimizer, "mse")
        x, y = (array[: STEPS * passes * ROWS].astype("float32") for array in _data(hvd.rank()))
        model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
        for weight, expected in zip(model.get_weights(), _simulate(passes)[hvd.rank()], strict=True):
            np.testing.assert_allclose(weight, expected, rtol=0, atol=2e-6)
        first, second, *_ = hvd.allgather_object([np.array(weight) for weight in model.get_weights()])
        assert (first[0] != second[0]).any()  # two steps after the last average


def lists() -> None:
    """A strategy is there once, for whatever list of variables is trained in a step."""
    with joined():
        data = make_data()
        reference, model = make_model(), make_model()
        wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), strategy=NamedAverage())
        cases = [(reference, keras.optimizers.SGD(0.1), data, ROWS * hvd.size()), (model, wrapped, mine(data), ROWS)]
        for each, optimizer, (x, y), rows in cases:
            optimizer.build(each.trainable_variables)
            for step, row in enumerate(range(0, len(x), rows)):
                gradients = _gradients(each, x[row : row + rows], y[row : row + rows])
                trained = slice(2 if step % 3 == 0 else 4)
                optimizer.apply(gradients[trained], each.trainable_variables[trained])
        assert_alike(model, reference)


def local_steps() -> None:
    """A step on variables that are each rank's own, or on none, is no step of the strategy."""
    with joined():
        strategy, model = PeriodicAverage(2), make_model()
        optimizer = hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(0.1), local_layers=model.layers[0], strategy=strategy
        )
        optimizer.build(model.trainable_variables)
        gradients = _gradients(model, *(array[:ROWS] for array in mine(make_data())))
        for part in (slice(2, 4), slice(0, 2), slice(2, 4), slice(0, 0)):
            optimizer.apply(gradients[part], model.trainable_variables[part])
        assert strategy.state_dict() == {"steps": 2}


def caught_mismatch() -> None:
    """Ranks that have caught a PlanMismatchError go on with the variables of before."""
    with joined():
        model = make_model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), strategy=AllReduce())
        optimizer.build(model.trainable_variables)
        gradients = [keras.ops.full(variable.shape, float(hvd.rank())) for variable in model.trainable_variables]
        optimizer.apply(gradients, model.trainable_variables)
        own = slice(1 + hvd.rank())
        with raises(Exception, "do not hold the same parameters"):
            optimizer.apply(gradients[own], model.trainable_variables[own])
        before = model.get_weights()
        optimizer.apply(gradients, model.trainable_variables)
        for new, old in zip(model.get_weights(), before, strict=True):
            np.testing.assert_allclose(new - old, -0.5, rtol=1e-5)


class _Reads(NamedAverage):
    """Reads values, and has no after_step()."""

    def attach(self, parameters: Parameters, group: Group) -> None:
        """See Strategy.attach."""
        ParameterValues(parameters.tensors, parameters.values).read(0)


def refused() -> None:
    """Arguments that contradict a strategy, and values that are not at hand."""
    with joined():

        def wrap(**arguments: Any) -> Any:
            return hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **arguments)

        with raises(ValueError, "cannot be combined with op"):
            wrap(strategy=NamedAverage(), op=hvd.Sum)
        with raises(ValueError, "cannot be combined with gradient_predivide_factor, compression,"):
            wrap(strategy=NamedAverage(), gradient_predivide_factor=2.0, compression=hvd.Compression.fp16)
        with raises(TypeError, "subclass of Strategy"):
            wrap(strategy=LateAverage)
        strategy = LateAverage()
        kept = wrap(strategy=strategy)
        with raises(ValueError, "strategy of another optimizer"):
            wrap(strategy=strategy)
        assert kept.learning_rate is not None
        if keras.backend.backend() == "torch":
            return
        model = make_model()
        gradients = _gradients(model, *(array[:ROWS] for array in mine(make_data())))
        with raises(Exception, "uses_values = True"):
            wrap(strategy=_Reads()).apply(gradients, model.trainable_variables)
