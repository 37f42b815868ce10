"""Bodies for ranks: names of operations in graphs, which run in any order, and the classes of their errors."""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_collectives import equal
from tensorflow_world import in_mode, joined

import hvdkit.tensorflow as hvd
from hvdkit.errors import RankLostError
from hvdkit.tensorflow.tracing import call_in_graph, raise_what_failed

INVALID, PRECONDITION = tf.errors.InvalidArgumentError, tf.errors.FailedPreconditionError


def any_order() -> None:
    """Rank 1 begins the operations of a graph from the last to the first, the others as TensorFlow likes."""
    with joined():
        rank, size = hvd.rank(), hvd.size()
        total = size * (size + 1) / 2

        def graph(x: Any) -> list[Any]:
            inputs = [x * at for at in range(8)]
            results = [_one_of(at, one) for at, one in enumerate(inputs)]
            gradients = [tf.gradients(_one_of(at, one), one)[0] for at, one in enumerate(inputs)]
            named = [hvd.allreduce(one, op=hvd.Sum, name="twice") for one in inputs[:2]]
            done = [*results, *gradients, *named]
            if rank == 1:
                for one, later in itertools.pairwise(results):
                    _before(later, one)
            return done

        found = in_mode("session", graph)(tf.fill([size], rank + 1.0))
        for at, one in enumerate(found[:8]):
            equal(one, _expected(at, rank, size) * at)
        for at, one in enumerate(found[8:16]):
            equal(one, np.full(size, size if at % 4 == 0 else 1.0))
        equal(found[16], np.zeros(size))
        equal(found[17], np.full(size, total))


def _one_of(at: int, x: Any) -> Any:
    calls: list[Callable[[Any], Any]] = [
        lambda x: hvd.allreduce(x, op=hvd.Sum),
        lambda x: hvd.grouped_allgather([x, x])[1],
        lambda x: hvd.alltoall(x),
        lambda x: hvd.grouped_allreduce([x, x])[0],
    ]
    return calls[at % 4](x)


def _expected(at: int, rank: int, size: int) -> Any:
    ranks = np.arange(size) + 1.0
    return [np.full(size, ranks.sum()), np.repeat(ranks, size), ranks, np.full(size, ranks.mean())][at % 4]


def _before(first: Any, then: Any) -> None:
    """Let what the second is computed of wait for the first."""
    seen = [then.op]
    while seen:
        operation = seen.pop()
        if operation.type == "TensorDataset":
            operation._add_control_input(first.op)
        seen += [one.op for one in operation.inputs]


def gradients_in_any_order() -> None:
    """Rank 1 begins the gradients in a function from the last to the first; the others begin the last one late."""
    with joined():
        rank, size = hvd.rank(), hvd.size()
        count = 4 + (os.cpu_count() or 1)  # more than TensorFlow has threads
        done: list[Any] = []

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def operation(x: Any) -> Any:
            def backward(grad: Any) -> Any:
                if rank != 1 and not done:
                    for _ in range(300):
                        grad = tf.reshape(tf.nn.relu(grad), tf.shape(grad))
                with tf.control_dependencies(done[-1:] if rank == 1 else []):
                    grad = tf.identity(grad)
                done.append(hvd.allreduce(grad, op=hvd.Sum))
                return done[-1]

            return tf.identity(x), backward

        @tf.function  # type: ignore[untyped-decorator]
        def function(x: Any) -> Any:
            return [operation(x * at) for at in range(count)]

        x = tf.Variable(tf.ones([2]))
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(y) for y in function(x)])
            equal(tape.gradient(loss, x), np.full(2, size * count * (count - 1) / 2))


def in_sessions() -> None:
    """Loops, conditions, functions, variables and tapes in one graph, run again and again."""
    with joined(), tf.Graph().as_default(), tf.compat.v1.Session() as session:
        rank, size = hvd.rank(), hvd.size()
        x = tf.compat.v1.placeholder(tf.float32, [2])
        total: Callable[[Any], Any] = functools.partial(hvd.allreduce, op=hvd.Sum)
        _, looped = tf.while_loop(
            lambda at, _: at < 4, lambda at, so_far: (at + 1, so_far + total(tf.cast(at, tf.float32) * x)), (0, 0 * x)
        )
        chosen = tf.cond(tf.reduce_sum(x) > 3, lambda: total(x) + 100, lambda: total(x))  # some ranks take the other
        inner = tf.function(lambda x: total(x) + total(10 * x))
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = x * x
        (slope,) = hvd.DistributedGradientTape(tape).gradient(loss, [x])
        variables = [
            tf.compat.v1.get_variable(f"v{resource}", initializer=[float(rank)], use_resource=resource)
            for resource in (True, False)
        ]
        calls: list[Callable[..., Any]] = [hvd.broadcast_variables, hvd.broadcast_]
        for root, broadcast in enumerate(calls):
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(broadcast(variables, root))
            assert session.run(variables) == [[root], [root]]
        hvd.barrier()  # at once
        for turn in range(3):
            mine, ranks = np.full(2, rank + 1.0 + turn), np.arange(size) + 1.0 + turn
            found = session.run([slope, looped, chosen, inner(x), hvd.rank_op()], {x: mine})
            np.testing.assert_allclose(found[0], np.full(2, 2 * ranks.mean()), rtol=1e-6)
            np.testing.assert_allclose(found[1], np.full(2, 6 * ranks.sum()), rtol=1e-6)
            np.testing.assert_allclose(found[2], np.full(2, ranks.sum() + 100 * (mine.sum() > 3)), rtol=1e-6)
            np.testing.assert_allclose(found[3], np.full(2, 11 * ranks.sum()), rtol=1e-6)
            np.testing.assert_allclose(found[4], rank, rtol=1e-6)


def traced_names() -> None:
    """Names belong to a function: not to how often a rank has traced it, nor when it runs."""
    with joined():
        rank, size = hvd.rank(), hvd.size()
        ranks = np.arange(size) + 1.0

        inner = tf.function(lambda x: hvd.allgather(x))

        def run_all(x: Any, branch: Any) -> Any:
            if rank == 0:  # of the graph's other operations ranks may have different ones
                tf.debugging.assert_non_negative(x)
            y = inner(x) * 2
            z = inner(3 * x)
            for _ in tf.range(3):
                z += hvd.allreduce(tf.ones(()), op=hvd.Sum)
            return y, z, tf.cond(branch, lambda: hvd.allreduce(x[0]), lambda: hvd.allreduce(x[0] + 1))

        outer = tf.function(run_all)
        for turn in range(3):  # rank 1 traces anew each time
            count = 2 + turn * (rank == 1)
            y, z, chosen = outer(tf.fill([count], rank + 1.0), tf.constant(rank == 0))
            rows = np.repeat(ranks, [2 + turn * (one == 1) for one in range(size)])
            equal(y, 2 * rows)
            equal(z, 3 * rows + 3 * size)
            equal(chosen, (ranks.sum() + size - 1) / size, 1e-6)

        def sum_1(x: Any) -> Any:
            return hvd.allreduce(x, op=hvd.Sum)

        def sum_2(x: Any) -> Any:
            return hvd.allreduce(10 * x, op=hvd.Sum)

        first, second = tf.function(sum_1), tf.function(sum_2)
        x, found = tf.constant(rank + 1.0), {}
        begun = threading.Event()

        def call(function: Any) -> None:
            begun.set()
            found[function] = float(function(x))

        one, other = (first, second) if rank == 0 else (second, first)
        thread = threading.Thread(target=call, args=(one,))
        thread.start()
        begun.wait()
        call(other)
        thread.join()
        assert (found[first], found[second]) == (ranks.sum(), 10 * ranks.sum())


def classes_of_errors(mode: str) -> None:
    """What Horovod raises is raised, and hvdkit's own where its classes get through."""
    with joined():
        rank, size = hvd.rank(), hvd.size()
        pair = hvd.add_process_set([0, 1])
        one = tf.fill([size, 2], 1.0)
        odd = rank % 2
        wrong_rows = tf.ones([size, 2 + rank])
        wrong_dtype = tf.ones([size], tf.int32 if odd else tf.float32)
        wrong_dimensions = tf.ones([size, 4] if odd else [size, 2, 2])
        disagree = [
            *[(call, x) for call in _CALLS for x in (wrong_rows, wrong_dtype, wrong_dimensions)],
            (lambda x: hvd.broadcast(x, rank), one),
            (lambda x: hvd.allreduce(x, op=hvd.Max if odd else hvd.Min), one),
        ]
        for call, x in disagree:
            assert _fails(in_mode(mode, call), x, PRECONDITION, hvd.HorovodInternalError, mode)
        refused: list[tuple[Callable[[Any], Any], Any]] = [
            (lambda x: hvd.alltoall(x), tf.ones(size + 1)),
            (lambda x: hvd.alltoall(x, [1] * size), tf.ones(size - 1)),
            (lambda x: hvd.alltoall(x, [1] * (size + 1)), tf.ones(size + 1)),
            (lambda x: hvd.alltoall(x, [1.0] * size), tf.ones(size)),
            (lambda x: hvd.broadcast(x, size), one),
            (lambda x: hvd.reducescatter(x), tf.constant(1.0)),
            (lambda x: hvd.size_op(17), one),
        ]
        if rank == 2:
            refused.append((lambda x: hvd.allreduce(x, process_set=pair), one))
        for call, x in refused:
            assert _fails(in_mode(mode, call), x, INVALID, ValueError, mode)
        with pytest.raises(
            np.exceptions.AxisError, match="axis 3 is out of bounds"
        ):  # another library's stays as it is
            hvd.allgather_object(_Unpicklable())
        hvd.barrier()
        late = in_mode(mode, lambda x: hvd.allreduce(x, op=hvd.Sum))
        equal(late(one), np.full((size, 2), size))
    assert _fails(late, one, PRECONDITION, ValueError, mode)
    with pytest.raises(ValueError, match=r"hvd\.init") as caught:
        hvd.rank_op()
    assert isinstance(caught.value, PRECONDITION)


class _Unpicklable:
    def __reduce__(self) -> Any:
        raise np.exceptions.AxisError(3, 2)


def failures_at_once() -> None:
    """Graphs that have failed by the time one of them is looked at raise what each has failed with."""
    both_failed = threading.Barrier(2)
    found: dict[str, Exception] = {}

    def train(text: str) -> None:
        def fail() -> Any:
            raise RankLostError(text)

        def step() -> Any:
            return [call_in_graph(fail, [], [tf.float32], name) for name in ("one", "two")]

        def run() -> None:
            try:
                tf.function(step)()
            finally:
                both_failed.wait(60)

        try:
            raise_what_failed(run)()
        except Exception as error:
            found[text] = error

    texts = ["Rank 1 has ended.", "Rank 1 has ended. The gradients of kernel were being reduced."]
    threads = [threading.Thread(target=train, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {text: (type(error), str(error)) for text, error in found.items()} == {
        text: (RankLostError, text) for text in texts
    }

    def other() -> None:
        tf.debugging.assert_equal(1, 2)

    with pytest.raises(INVALID):
        raise_what_failed(tf.function(other))()


def groups_of_different_sizes(mode: str) -> None:
    with joined():
        call = in_mode(mode, lambda x: hvd.grouped_allreduce([x] * (1 + hvd.rank() % 2)))
        assert _fails(call, tf.ones(2), PRECONDITION, hvd.HorovodInternalError, mode)


def sum_in_a_function() -> float:
    with joined():
        return float(in_mode("graph", lambda x: hvd.allreduce(x, op=hvd.Sum))(tf.constant(hvd.rank() + 1.0)))


_CALLS: list[Callable[[Any], Any]] = [
    lambda x: hvd.allreduce(x),
    lambda x: hvd.allgather(x),
    lambda x: hvd.alltoall(x),
    lambda x: hvd.broadcast(x, 0),
    lambda x: hvd.reducescatter(x),
]


def _fails(call: Callable[[Any], Any], x: Any, theirs: type[Exception], ours: type[Exception], mode: str) -> bool:
    with pytest.raises(theirs) as caught:
        call(x)
    # A graph's error has TensorFlow's text around ours.
    return mode != "eager" or (isinstance(caught.value, ours) and "Node: " not in str(caught.value))
