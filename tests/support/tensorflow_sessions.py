"""Bodies for ranks: training in graphs for sessions, by optimizers of tf.compat.v1.train."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_world import joined

import hvdkit.tensorflow as hvd

v1 = tf.compat.v1


def _weights(*, resource: bool) -> list[Any]:
    """A matrix of which each step uses some rows, and a vector; other numbers on each rank."""
    start = float(hvd.rank())
    return [
        v1.get_variable("rows", initializer=np.full((4, 2), start, "float32"), use_resource=resource),
        v1.get_variable("bias", initializer=np.full(2, start, "float32"), use_resource=resource),
    ]


def _loss(weights: list[Any], row: Any, scale: float = 1.0) -> Any:
    rows, bias = weights
    return scale * tf.reduce_sum((tf.gather(rows, [row]) + bias - 3.0) ** 2)


def _alone(batches: list[list[int]], rate: float) -> tuple[Any, Any]:
    """The weights after steps of one process, each on the average of all ranks' losses."""
    rows, bias = np.zeros((4, 2)), np.zeros(2)
    for batch in batches:
        slopes, slope = np.zeros((4, 2)), np.zeros(2)
        for row in batch:
            one = 2 * (rows[row] + bias - 3) / len(batch)
            slopes[row] += one
            slope += one
        rows, bias = rows - rate * slopes, bias - rate * slope
    return rows, bias


def as_one_process() -> None:
    """Variables of both kinds, sparse gradients and dense ones, begin and are trained as in one process."""
    with joined():
        rank, size = hvd.rank(), hvd.size()
        for resource in (True, False):
            for dense in (True, False):
                with tf.Graph().as_default():
                    row = v1.placeholder(tf.int32, [])
                    weights, step = _weights(resource=resource), v1.train.create_global_step()
                    plain = v1.train.GradientDescentOptimizer(0.1)
                    optimizer = hvd.DistributedOptimizer(plain, sparse_as_dense=dense)
                    assert isinstance(optimizer, v1.train.GradientDescentOptimizer)
                    train = optimizer.minimize(_loss(weights, row), global_step=step)
                    hooks = [hvd.BroadcastGlobalVariablesHook(0)]
                    with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
                        assert all(np.all(one == 0) for one in session.run(weights))
                        for at in range(3):
                            session.run(train, {row: (rank + at) % 4})
                        found = session.run([*weights, step])
                expected = _alone([[(one + at) % 4 for one in range(size)] for at in range(3)], 0.1)
                for one, other in zip(found, (*expected, 3), strict=True):
                    np.testing.assert_allclose(one, other, rtol=1e-5)


def at_once() -> None:
    """Two reductions of the same variables in one run of a session do not disturb each other."""
    with joined(), tf.Graph().as_default(), v1.Session() as session:
        rank, size = hvd.rank(), hvd.size()
        weights = _weights(resource=True)
        optimizer = hvd.DistributedOptimizer(v1.train.AdamOptimizer(0.1), sparse_as_dense=True)
        slopes = [
            [slope for slope, _ in optimizer.compute_gradients(_loss(weights, 1, scale * (rank + 1.0)))]
            for scale in (1.0, 10.0)
        ]
        session.run(v1.global_variables_initializer())
        session.run(hvd.broadcast_global_variables(0))
        for _ in range(5):
            few, many = session.run(slopes)
            np.testing.assert_allclose(few[1], np.full(2, -6 * (size + 1) / 2), rtol=1e-5)
            np.testing.assert_allclose(many[0], 10 * few[0], rtol=1e-5)


def one_function_twice() -> str:
    """Two calls of one function in one run of a session: one after the other they are right, at once an error.

    Returns the error. It is that of another rank's end on a rank whose calls have not met before that.
    """
    with joined(), tf.Graph().as_default(), v1.Session() as session:
        rank, size = hvd.rank(), hvd.size()
        weights = _weights(resource=True)

        def slopes(scale: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = scale * sum(tf.reduce_sum(weight) for weight in weights)
            return hvd.DistributedGradientTape(tape).gradient(loss, weights)

        def other(scale: Any) -> Any:
            return slopes(scale)

        function = tf.function(slopes)
        first = function(tf.constant(rank + 1.0))
        with tf.control_dependencies(first):
            after = function(tf.identity(tf.constant(10 * (rank + 1.0))))
        of_another_name = tf.function(other)(tf.constant(10 * (rank + 1.0)))
        at_once = function(tf.constant(10 * (rank + 1.0)))
        session.run(v1.global_variables_initializer())
        for _ in range(5):
            for second in (after, of_another_name):
                few, many = session.run([first, second])
                np.testing.assert_allclose(few[0], np.full((4, 2), (size + 1) / 2), rtol=1e-6)
                np.testing.assert_allclose(many[0], 10 * few[0], rtol=1e-6)
        with pytest.raises(tf.errors.UnknownError) as caught:
            for _ in range(50):
                session.run([first, at_once])
    return str(caught.value)


def refused() -> None:
    with joined():
        with pytest.raises(RuntimeError, match=r"outside of a graph.*broadcast_variables"):
            hvd.broadcast_global_variables(0)
        with pytest.raises(ValueError, match=r"backward_passes_per_step with GradientDescentOptimizer"):
            hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1), backward_passes_per_step=2)
        with pytest.raises(TypeError, match="not object"):
            hvd.DistributedOptimizer(object())
