"""Bodies for ranks: collectives of hvdkit.tensorflow, eagerly and inside a tf.function."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_world import in_mode, joined

import hvdkit.tensorflow as hvd

FLOATS = ("float16", "bfloat16", "float32", "float64")
WHOLE = ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
COMPLEX = ("complex64", "complex128")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def equal(tensor: Any, expected: Any, tolerance: float = 0.0) -> None:
    """The numbers and the shape."""
    narrow = tensor.dtype.name in FLOAT8  # which is cast to float32 only
    found = np.asarray(tf.cast(tf.cast(tensor, tf.float32) if narrow else tensor, tf.float64))
    np.testing.assert_allclose(found, np.asarray(expected, np.float64), rtol=tolerance, atol=tolerance)
    assert found.shape == np.shape(expected)


def every_kind_of_reduction(mode: str) -> None:
    with joined():
        rank, size = hvd.rank(), hvd.size()
        ranks = np.arange(size) + 1
        ops = (hvd.Sum, hvd.Min, hvd.Max, hvd.Product, hvd.Average)
        reduce = in_mode(mode, lambda x: [hvd.allreduce(x, op=op) for op in ops])
        some = os.environ.get("HVDKIT_ENGINE") == "horovod"  # whose core does not add every dtype
        added = ("float16", "float32", "float64", "int8", "uint8", "int32", "int64")
        for dtype in added if some else (*FLOATS, *WHOLE):
            mine = tf.cast(tf.fill([3, 2], rank + 1), dtype)
            mean = ranks.mean() if dtype in FLOATS else ranks.sum() // size
            for made, expected in zip(reduce(mine), (ranks.sum(), 1, size, ranks.prod(), mean), strict=True):
                assert made.dtype == mine.dtype
                equal(made, np.full((3, 2), expected), 1e-2 if dtype == "bfloat16" else 1e-3)
        if some:
            with pytest.raises(TypeError, match="cannot reduce uint8"):
                hvd.reducescatter(tf.ones([size], tf.uint8))
        else:
            summed = in_mode(mode, lambda x: [hvd.allreduce(x, op=op) for op in (hvd.Sum, hvd.Average, hvd.Product)])
            for dtype in COMPLEX:
                made = summed(tf.constant([1 + 1j * rank], dtype))
                expected = [size + 1j * (ranks.sum() - size), 1 + 1j * (size - 1) / 2, np.prod(1 + 1j * (ranks - 1))]
                np.testing.assert_allclose(np.ravel(made), expected, rtol=1e-6)
            full = in_mode(mode, lambda x: [hvd.allreduce(x), hvd.reducescatter(x)])
            for made in full(tf.fill([2 * size], tf.constant(200, tf.uint8))):
                assert set(made.numpy().tolist()) == {200}
            either = in_mode(mode, lambda x: hvd.allreduce(x, op=hvd.Max))(tf.constant([rank == 0, False]))
            assert either.numpy().tolist() == [True, False]
        scaled = in_mode(mode, lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5))
        equal(scaled(tf.fill([70000], float(rank + 1))), np.full(70000, ranks.sum()))
        for dtype in ("int32", "float64"):
            _scales(mode, tf.fill([size], tf.constant(2, dtype)))
        if not some:
            large = in_mode(mode, lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.25))
            for count in (4, 70000):  # each is scaled before the sum, which would be infinite
                equal(large(tf.fill([count], 3e38)), np.full(count, size * 7.5e37), 1e-6)
        kinds = (hvd.Compression.fp16,) if some else (hvd.Compression.fp16, hvd.Compression.bf16)
        compressed = in_mode(mode, lambda x: [hvd.allreduce(x, compression=one) for one in kinds])
        for small in compressed(tf.fill([4], float(rank))):
            assert small.dtype == tf.float32
            equal(small, np.full(4, (size - 1) / 2), 1e-2)
        equal(compressed(tf.fill([9000], 65000.0))[0], np.full(9000, 65000.0), 1e-2)
        for dtype in (*FLOATS, "int32", "bool"):
            small, context = hvd.Compression.fp16.compress(tf.cast(tf.ones(2), dtype))
            assert small.dtype == (tf.float16 if dtype in ("float32", "float64") else dtype)
            assert hvd.Compression.fp16.decompress(small, context).dtype == dtype
        group = in_mode(mode, lambda *x: hvd.grouped_allreduce(list(x), op=hvd.Sum, name="group"))
        one, two = group(tf.fill([2], float(rank)), tf.fill([], float(rank)))
        equal(one, np.full(2, ranks.sum() - size))
        equal(two, ranks.sum() - size)
        assert hvd.grouped_allreduce([]) == []
        older = in_mode(mode, lambda x: hvd.allreduce(x, False))(tf.Variable([1.0]))
        equal(older, [size])


def _scales(mode: str, x: Any) -> None:
    """Of integers each product drops its fraction: on three ranks that of 0.7 * 2 before the sum, of 0.7 * 6 after."""
    calls: list[Any] = [
        hvd.allreduce,
        hvd.reducescatter,
        lambda x, **options: hvd.grouped_allreduce([x], **options)[0],
        lambda x, **options: hvd.grouped_reducescatter([x], **options)[0],
    ]
    for options, whole in (({"prescale_factor": 0.7}, 3), ({"postscale_factor": 0.7}, 4)):
        scaled = in_mode(mode, lambda x, o=options: [call(x, op=hvd.Sum, **o) for call in calls])
        for made in scaled(x):
            assert made.dtype == x.dtype
            equal(made, np.full(made.shape, whole if x.dtype.is_integer else 4.2), 1e-6)


def every_other_collective(mode: str) -> None:
    with joined():
        rank, size = hvd.rank(), hvd.size()
        total = size * (size + 1) // 2
        both = in_mode(mode, lambda x, y: (hvd.allgather(x), hvd.broadcast(y, 1)))
        for dtype in (*FLOATS, *WHOLE, "bool", *COMPLEX, *FLOAT8):
            rows = tf.cast(tf.fill([rank + 1, 2], 1.0), dtype)
            gathered, copied = both(rows, tf.cast(tf.fill([5], float(rank == 1)), dtype))
            assert gathered.dtype == copied.dtype == rows.dtype
            equal(gathered, np.ones((total, 2)))
            equal(copied, np.ones(5))
        order = in_mode(mode, lambda x: hvd.allgather(x))(tf.fill([rank], rank))
        equal(order, np.repeat(np.arange(size), np.arange(size)))
        equal(in_mode(mode, lambda x: hvd.allgather(x))(tf.constant(rank)), np.arange(size))
        one, two = in_mode(mode, lambda *x: hvd.grouped_allgather(list(x)))(tf.fill([1, 3], rank), tf.fill([2], 1.0))
        equal(one, np.repeat(np.arange(size), 3).reshape(size, 3))
        equal(two, np.ones(2 * size))

        equal(in_mode(mode, lambda x: hvd.alltoall(x))(tf.range(size) + 10 * rank), 10 * np.arange(size) + rank)
        splits = tf.range(1, size + 1)
        uneven = in_mode(mode, lambda x, s: hvd.alltoall(x, s))
        received, counts = uneven(tf.fill([total, 2], rank), splits)
        equal(received, np.repeat(np.arange(size), rank + 1)[:, None] * np.ones((1, 2)))
        equal(counts, np.full(size, rank + 1))
        for sends, receives in ((False, True), (True, False), (False, False)):  # rank 0
            rows = np.repeat(np.arange(size)[:, None] + 1, size, axis=1)
            rows[0] *= sends
            rows[:, 0] *= receives
            again = in_mode(mode, lambda x, s: hvd.alltoall(x, s, name="again"))
            received, counts = again(tf.fill([int(rows[rank].sum()), 2], rank), tf.constant(rows[rank], tf.int32))
            equal(received, np.repeat(np.arange(size), rows[:, rank])[:, None] * np.ones((1, 2)))
            equal(counts, rows[:, rank])
        equal(in_mode(mode, lambda x: hvd.alltoall(x))(tf.zeros([size, 0])), np.zeros((size, 0)))

        mine = tf.reshape(tf.range(2 * size + 1, dtype=tf.float32), [-1, 1]) * tf.ones([1, 2])
        with pytest.raises(NotImplementedError, match=r"op is hvd\.Max"):
            in_mode(mode, lambda x: hvd.reducescatter(x, op=hvd.Max))(mine)
        scattered = in_mode(mode, lambda x: hvd.reducescatter(x, op=hvd.Sum))(mine)
        first, count = rank * 2 + min(rank, 1), 2 + (rank < 1)
        equal(scattered, size * mine.numpy()[first : first + count])
        some = in_mode(mode, lambda *x: hvd.grouped_reducescatter(list(x)))(mine, mine)
        equal(some[1], mine.numpy()[first : first + count])

        if mode != "session":  # whose graphs have variables of their own, see in_sessions()
            variables = [tf.Variable(tf.fill([3], rank)), tf.Variable(float(rank)), tf.Variable([rank == 0])]
            in_mode(mode, lambda: hvd.broadcast_variables(variables, 0))()
            assert [one.numpy().tolist() for one in variables] == [[0, 0, 0], 0.0, [True]]
            values = in_mode(mode, lambda: hvd.broadcast_([variables[0]], size - 1))()
            equal(values[0], np.zeros(3))

        asked = in_mode(mode, lambda: (hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()))()
        assert [int(one) for one in asked] == [rank, size, rank, size]
        assert [int(in_mode(mode, lambda n=n: hvd.process_set_included_op(n))()) for n in (0, 7)] == [1, -3]
        in_mode(mode, lambda: hvd.barrier())()


def _gradient(mode: str, function: Any, x: Any, weight: float = 1.0) -> Any:
    """That of weight * function(x), where what comes from above is float32, as in Horovod's tests."""

    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, x, tf.fill(tf.shape(y), weight))

    return in_mode(mode, compute)(x)


def gradients(mode: str) -> None:
    with joined():
        rank, size = hvd.rank(), hvd.size()
        gradient = functools.partial(_gradient, mode)
        x = tf.ones([size, 2])
        for dtype in (tf.float32, tf.float64):
            equal(
                gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), tf.cast(x, dtype), rank + 1.0), np.full((size, 2), 6)
            )
        equal(gradient(lambda x: hvd.allreduce(x), x, rank + 1.0), np.full((size, 2), 2))
        calls: list[Any] = [hvd.allgather, lambda x: hvd.broadcast(x, 1), hvd.alltoall, hvd.reducescatter]
        for call in calls:
            assert gradient(lambda x, c=call: c(x), tf.cast(x, tf.float64)).dtype == tf.float64
        equal(gradient(lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum)[1], x), np.full((size, 2), size))
        # Of y each rank's rows get the average of all ranks' weights, as in Horovod.
        equal(gradient(lambda x: hvd.allgather(x), tf.ones([rank + 1, 2]), rank + 1.0), np.full((rank + 1, 2), 2))
        equal(gradient(lambda x: hvd.allgather(x), tf.constant(1.0), rank + 1.0), 2)
        equal(gradient(lambda x: hvd.grouped_allgather([x, x])[0], x), np.ones((size, 2)))
        equal(gradient(lambda x: hvd.broadcast(x, 1), x, rank + 1.0), np.full((size, 2), 2 if rank == 1 else 0))
        equal(gradient(lambda x: hvd.alltoall(x), x, rank + 1.0), (np.arange(size) + 1)[:, None] * np.ones((1, 2)))
        splits = [1] + [0] * (size - 1)
        sent = gradient(lambda x: hvd.alltoall(x, splits)[0], x, rank + 1.0)
        equal(sent, np.concatenate([np.ones((1, 2)), np.zeros((size - 1, 2))]))
        equal(gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), x), np.full((size, 2), size))
        equal(gradient(lambda x: hvd.reducescatter(x), x), np.ones((size, 2)))
        equal(gradient(lambda x: hvd.reducescatter(x, prescale_factor=0.5), x), np.full((size, 2), 0.5))

        def second(x: Any) -> Any:
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = hvd.allreduce(x, op=hvd.Sum) ** 2
                slope = inner.gradient(y, x)
            return outer.gradient(slope, x)

        equal(in_mode(mode, second)(tf.constant(1.0)), 2 * size**2)
        try:
            gradient(lambda x: hvd.allreduce(x, op=hvd.Max), x)
        except NotImplementedError as error:
            assert "hvd.Sum" in str(error)
        else:
            raise AssertionError


def sparse(mode: str) -> None:
    with joined():
        rank, size = hvd.rank(), hvd.size()
        slices = tf.IndexedSlices(tf.fill([rank + 1, 2], 1.0), tf.range(rank + 1), tf.constant([size, 2]))

        def reduce(values: Any, indices: Any, shape: Any, op: Any) -> Any:
            return tf.convert_to_tensor(hvd.allreduce(tf.IndexedSlices(values, indices, shape), op=op))

        for op, factor in ((hvd.Sum, 1.0), (hvd.Average, 1 / size)):
            dense = in_mode(mode, lambda v, i, s, op=op: reduce(v, i, s, op))(
                slices.values, slices.indices, slices.dense_shape
            )
            equal(dense, np.arange(size, 0, -1)[:, None] * np.full((1, 2), factor), 1e-6)
        for dtype in ("uint8", "int64", "float16"):  # and without a shape

            def group(dtype: str = dtype) -> Any:
                rows = tf.IndexedSlices(tf.cast(tf.ones([2, 1]), dtype), tf.constant([rank, rank + 1]))
                return [(one.values, one.indices) for one in hvd.grouped_allreduce([rows, rows], op=hvd.Sum)]

            for values, indices in in_mode(mode, group)():
                assert values.dtype == dtype
                equal(values, np.ones((2 * size, 1)))
                equal(indices, np.repeat(np.arange(size), 2) + np.tile([0, 1], size))
        one, two = hvd.grouped_allreduce([slices, tf.ones(1)], op=hvd.Sum)
        assert isinstance(one, tf.IndexedSlices)
        equal(two, [size])
        for wrong in ({"op": hvd.Max}, {"prescale_factor": 2.0}):
            with pytest.raises(NotImplementedError, match="IndexedSlices"):
                hvd.allreduce(slices, **wrong)


def sets(mode: str) -> None:
    with joined():
        rank = hvd.rank()
        pair = hvd.add_process_set([0, 2])
        if rank != 1:
            equal(in_mode(mode, lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=pair))(tf.fill([2], rank)), [2, 2])
            equal(in_mode(mode, lambda x: hvd.allgather(x, process_set=pair))(tf.fill([1], rank)), [0, 2])
            equal(in_mode(mode, lambda x: hvd.broadcast(x, 2, process_set=pair))(tf.fill([1], rank)), [2])
            assert int(in_mode(mode, lambda: hvd.size_op(pair.process_set_id or 0))()) == 2
            _on_a_pair(mode, pair)
            assert hvd.broadcast_object(rank, 2, process_set=pair) == 2
            assert hvd.allgather_object(rank, process_set=pair) == [0, 2]
        else:
            with pytest.raises(ValueError, match="rank 1"):
                hvd.allreduce(tf.ones(1), process_set=pair)
        assert int(hvd.process_set_included_op(pair.process_set_id or 0)) == int(rank != 1)
        other = hvd.ProcessSet([0])
        other.process_set_id = 10
        with pytest.raises(ValueError, match="has not been added"):
            hvd.allreduce(tf.ones(1), process_set=other)
        ranks: Any = [0, 2]
        calls: list[Callable[[Any], Any]] = [
            lambda x: hvd.allreduce(x, process_set=ranks),
            lambda x: hvd.allgather(x, process_set=ranks),
            lambda x: hvd.broadcast(x, 2, process_set=ranks),
            lambda x: hvd.alltoall(x, process_set=ranks),
            lambda x: hvd.reducescatter(x, process_set=ranks),
            lambda x: hvd.DistributedGradientTape(tf.GradientTape(), process_set=ranks),
        ]
        for call in calls:
            with pytest.raises(TypeError, match=r"process_set is \[0, 2\], but it must be an hvd.ProcessSet"):
                in_mode(mode, call)(tf.ones(2))

        def slope(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = x * x
            return hvd.DistributedGradientTape(tape, process_set=pair).gradient(y, [x])[0]

        equal(in_mode(mode, slope)(tf.constant(float(rank**2))), 2 * rank**2 if rank == 1 else 4)
        assert hvd.allgather_object({"rank": rank}) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert hvd.broadcast_object_fn(1)(rank) == 1
        assert hvd.remove_process_set(pair)


def _on_a_pair(mode: str, pair: Any) -> None:
    """The ranks 0 and 2, which are 0 and 1 in their set."""
    rank, x = hvd.rank(), tf.fill([4, 2], float(hvd.rank()))
    halves, wide = np.ones((2, 2)), np.ones((1, 2))
    calls: list[tuple[Any, Any, Any]] = [  # with the result, and the gradient of each rank's number + 1 times it
        (lambda x: hvd.allreduce(x, process_set=pair), np.ones((4, 2)), np.full((4, 2), 2)),
        (lambda x: hvd.grouped_allreduce([x], process_set=pair)[0], np.ones((4, 2)), np.full((4, 2), 2)),
        (lambda x: hvd.allgather(x, process_set=pair), np.repeat([[0], [2]], 4, axis=0) * wide, np.full((4, 2), 2)),
        (
            lambda x: hvd.grouped_allgather([x], process_set=pair)[0],
            np.repeat([[0], [2]], 4, axis=0) * wide,
            np.full((4, 2), 2),
        ),
        (lambda x: hvd.broadcast(x, 2, process_set=pair), np.full((4, 2), 2), np.full((4, 2), rank)),
        (
            lambda x: hvd.alltoall(x, process_set=pair),
            np.repeat([[0], [2]], 2, axis=0) * wide,
            np.repeat([[1], [3]], 2, axis=0) * wide,
        ),
        (lambda x: hvd.reducescatter(x, process_set=pair), halves, np.repeat([[1], [3]], 2, axis=0) * wide),
        (
            lambda x: hvd.grouped_reducescatter([x], process_set=pair)[0],
            halves,
            np.repeat([[1], [3]], 2, axis=0) * wide,
        ),
    ]
    for call, result, slope in calls:
        equal(in_mode(mode, call)(x), result)
        equal(_gradient(mode, call, x, rank + 1.0), slope)
    if mode != "session":
        variable = tf.Variable(rank)
        in_mode(mode, lambda: hvd.broadcast_variables([variable], 2, process_set=pair))()
        assert variable.numpy() == 2


def errors() -> None:
    with joined():
        rank = hvd.rank()
        with pytest.raises(tf.errors.FailedPreconditionError, match="rank 1") as caught:
            hvd.allreduce(tf.ones(2 + (rank == 1)), name="weights")
        assert isinstance(caught.value, hvd.HorovodInternalError)
        assert "weights" in str(caught.value)
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"weights.*rank 1"):
            tf.function(lambda: hvd.allreduce(tf.ones(2, tf.float64 if rank == 1 else tf.float32), name="weights"))()
        with pytest.raises(hvd.HorovodInternalError, match="root"):
            hvd.broadcast(tf.ones(1), rank % 2)
        with pytest.raises(ValueError, match="root_rank is 9"):
            hvd.broadcast(tf.ones(1), 9)
        with pytest.raises(ValueError, match="splits"):
            hvd.alltoall(tf.ones(2), [1.0, 1.0, 0.0])
        for dtype, op in (("complex64", hvd.Min), ("float8_e5m2", hvd.Sum)):
            with pytest.raises(TypeError, match=rf"allreduce\(\): op {op.kind} of {dtype}"):
                hvd.allreduce(tf.cast(tf.ones(1), dtype), op=op)
        with pytest.raises(TypeError, match="qint8 cannot be sent"):
            hvd.broadcast(tf.cast(tf.ones(1), tf.qint8), 0)
        with pytest.raises(TypeError, match="bool"):
            hvd.allreduce(tf.constant([True]))
        tiny = tf.Variable(tf.cast(tf.ones(2), "float8_e5m2"), name="tiny")
        wave = tf.Variable(tf.ones([2], tf.complex64))
        for variables, expected in (([wave], 2.0 + rank), ([wave, tiny], None)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((2.0 + rank) * tf.math.real(wave)) + tf.reduce_sum(tf.cast(tiny, tf.float32))
            tape = hvd.DistributedGradientTape(tape, op=hvd.Average)
            if expected is not None:
                equal(tape.gradient(loss, variables)[0], [2.0 + (hvd.size() - 1) / 2] * 2)
            else:
                with pytest.raises(TypeError, match="the variable tiny is float8_e5m2"):
                    tape.gradient(loss, variables)
        compiled = tf.function(lambda x: hvd.allreduce(x), jit_compile=True)
        with pytest.raises(Exception, match="jit_compile=False"):
            compiled(tf.ones(1))
        assert hvd.broadcast_object(rank, 1, session=object()) == 1
        equal(hvd.allreduce(tf.ones(1), op=hvd.Sum), [hvd.size()])
    with pytest.raises(ValueError, match=r"hvd\.init"):
        hvd.allreduce(tf.ones(1))


def uneven_batches(mode: str) -> list[int]:
    with joined():
        rank = hvd.rank()
        reduce = in_mode(mode, lambda x: hvd.allreduce(x, op=hvd.Sum))
        seen = [int(reduce(tf.constant(1.0))) for _ in range(rank + 1)]
        last = int(in_mode(mode, hvd.join)())
        assert last == hvd.size() - 1
        return seen
