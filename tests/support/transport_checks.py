"""What every transport must do: functions that run on all ranks and raise where it does not."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from numbers_of_ranks import DTYPES, FLOATS, REDUCTIONS, buffer_of, expect, lengths, pattern, reduced, values_of

from hvdkit.errors import TransportError
from hvdkit.transport.api import Transport
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.buffer import Buffer, make_buffer


def allreduce_every_dtype_and_op(transport: Transport) -> None:
    for dtype, op in REDUCTIONS:
        for count in lengths(transport.size):
            buffer = buffer_of(pattern(transport.rank, count, dtype, op), dtype)
            transport.allreduce(buffer, op)
            expect(buffer, reduced(transport.size, count, dtype, op), f"{dtype} {op} {count}")


def what_is_not_defined_is_refused(transport: Transport) -> None:
    size = transport.size
    for count in (size, 20_000 * size):
        for dtype, op in (("float8_e4m3fn", "sum"), ("complex64", "min"), ("complex128", "max")):
            for reduce in (
                lambda buffer, op: transport.allreduce(buffer, op),
                lambda buffer, op: transport.reducescatter(buffer, [buffer.count // size] * size, op),
                lambda buffer, op: transport.open_buckets([BucketSpec(buffer.dtype, buffer.count, op)]),
            ):
                with pytest.raises(TypeError, match=f"{op} of {dtype}"):
                    reduce(make_buffer(count, dtype), op)
    one = buffer_of([1], "complex64")
    transport.allreduce(one, "sum", 1 / 3)  # the transport is as usable as before
    np.testing.assert_allclose(one.array, size / 3)


def allreduce_long(transport: Transport) -> None:
    for dtype, count in (("float32", 2_500_007), ("bfloat16", 300_007), ("float16", 100_003), ("int64", 40_009)):
        buffer = buffer_of(pattern(transport.rank, count), dtype)
        transport.allreduce(buffer)
        expect(buffer, reduced(transport.size, count), dtype)


def allreduce_leaves_its_neighbours_alone(transport: Transport) -> None:
    whole = buffer_of(np.full(40_000, -1.0), "float32")
    part = whole.slice(3, 39_000)
    part.array[:] = pattern(transport.rank, part.count)
    transport.allreduce(part)
    expect(part, reduced(transport.size, part.count))
    assert (whole.array[:3] == -1).all() and (whole.array[39_000:] == -1).all()


def reducescatter_even_and_uneven(transport: Transport) -> None:
    rank, size = transport.rank, transport.size
    for counts in ([5] * size, [3 * i % 4 for i in range(size)], [0] * (size - 1) + [7], [0] * size):
        count, start = sum(counts), sum(counts[:rank])
        for dtype, op in REDUCTIONS:
            buffer = buffer_of(pattern(rank, count, dtype, op), dtype)
            piece = transport.reducescatter(buffer, counts, op)
            assert (piece.dtype, piece.count) == (dtype, counts[rank])
            expected = reduced(size, count, dtype, op)[start : start + counts[rank]]
            expect(piece, expected, f"{dtype} {op} {counts}")
            expect(buffer, pattern(rank, count, dtype, op), "the source was changed")


def allgather_even_and_uneven(transport: Transport) -> None:
    rank, size = transport.rank, transport.size
    for counts in ([5] * size, [3 * i % 4 for i in range(size)], [0] * (size - 1) + [7], [0] * size):
        for dtype in DTYPES:
            gathered = transport.allgather(buffer_of(pattern(rank, counts[rank], dtype), dtype), counts)
            expected = np.concatenate([pattern(i, counts[i], dtype) for i in range(size)])
            assert gathered.dtype == dtype
            expect(gathered, expected, f"{dtype} {counts}")


def allgather_of_memory_that_may_not_be_written(transport: Transport) -> None:
    data = Buffer(np.frombuffer(bytes([transport.rank]) * 3, np.uint8), "uint8")
    expect(transport.allgather(data, [3] * transport.size), np.repeat(np.arange(transport.size), 3))


def broadcast_from_each_root(transport: Transport) -> None:
    for root in range(transport.size):
        for dtype in DTYPES:
            for count in lengths(transport.size):
                buffer = buffer_of(pattern(transport.rank, count, dtype), dtype)
                transport.broadcast(buffer, root)
                expect(buffer, pattern(root, count, dtype), f"{dtype} {count} from {root}")


def alltoall_uneven(transport: Transport) -> None:
    rank, size = transport.rank, transport.size

    def count(source: int, target: int) -> int:
        return (source + 2 * target) % 4

    for dtype in DTYPES:
        send_counts = [count(rank, target) for target in range(size)]
        receive_counts = [count(source, rank) for source in range(size)]
        buffer = buffer_of(np.repeat(10 * rank + np.arange(size), send_counts), dtype)
        received = transport.alltoall(buffer, send_counts, receive_counts)
        expected = np.repeat(10 * np.arange(size) + rank, receive_counts)
        expect(received, expected != 0 if dtype == "bool" else expected, dtype)


def barrier_waits_for_the_last(transport: Transport) -> None:
    time.sleep(0.02 * transport.rank)
    came = time.monotonic()
    transport.barrier()
    left = time.monotonic()
    times = [buffer_of([moment], "float64") for moment in (came, left)]
    all_came, all_left = (transport.allgather(moment, [1] * transport.size).array for moment in times)
    assert all_came.max() <= all_left.min()


def halves_are_summed_in_float32(transport: Transport) -> None:
    # Next to the large number, where numbers are 2 apart, one small term is lost in 16 bits, and two are not.
    for dtype, large in (("float16", 2048.0), ("bfloat16", 256.0)):
        mine = large if transport.rank == 0 else 0.75
        expected = values_of(buffer_of([large + 0.75 * (transport.size - 1)], dtype))[0]
        for count in (3, 50_000):
            buffer = buffer_of(np.full(count, mine), dtype)
            piece = transport.reducescatter(buffer, [count] + [0] * (transport.size - 1))
            expect(piece, np.full(piece.count, expected), dtype)
            transport.allreduce(buffer)
            # Between hosts each host's sum travels in the buffer's own dtype, which rounds it a second time.
            unit = 2.0 if transport.name == "hierarchical" else 0.0
            np.testing.assert_allclose(values_of(buffer), np.full(count, expected), rtol=0, atol=unit)


def all_ranks_hold_the_same_bits(transport: Transport) -> None:
    generator = np.random.default_rng(transport.rank)
    for dtype in FLOATS:
        for count in (501, 50_021):
            buffer = buffer_of(generator.standard_normal(count) * 100, dtype)
            transport.allreduce(buffer)
            every = transport.allgather(Buffer(buffer.array.view(np.uint8), "uint8"), [buffer.nbytes] * transport.size)
            rows = every.array.reshape(transport.size, -1)
            assert (rows == rows[0]).all(), f"{dtype} {count}"


def nan_and_inf_stay(transport: Transport) -> None:
    for dtype in FLOATS:
        for count in (4, 40_000):
            buffer = buffer_of(np.zeros(count), dtype)
            if transport.rank == transport.size - 1:
                buffer.array[:3] = buffer_of([np.nan, np.inf, -np.inf], dtype).array
            transport.allreduce(buffer)
            np.testing.assert_array_equal(values_of(buffer)[:4], [np.nan, np.inf, -np.inf, 0])


def subgroups_number_ranks_in_the_order_given(transport: Transport) -> None:
    size = transport.size
    for ranks in (list(range(size))[::-1], list(range(0, size, 2)), [size - 1]):
        group = transport.split([ranks])
        assert (group is None) == (transport.rank not in ranks)
        if group is None:
            continue
        assert (group.rank, group.size) == (ranks.index(transport.rank), len(ranks))
        gathered = group.allgather(buffer_of([transport.rank], "int64"), [1] * len(ranks))
        assert gathered.array.tolist() == ranks
        for count in (3, 40_000):
            buffer = buffer_of(np.full(count, transport.rank), "float32")
            group.allreduce(buffer)
            expect(buffer, np.full(count, sum(ranks)))
        group.close()
    total = buffer_of([1], "int32")
    transport.allreduce(total)
    assert total.array[0] == size


def a_closed_transport_says_so(transport: Transport) -> None:
    group = transport.split([range(transport.size)])
    assert group is not None
    group.close()
    group.close()
    with pytest.raises(TransportError, match="closed"):
        group.allreduce(buffer_of([1], "float32"))
    with pytest.raises(TransportError, match="closed"):
        group.barrier()


def arguments_that_do_not_fit_are_refused(transport: Transport) -> None:
    buffer, size = make_buffer(4, "float32"), transport.size
    ones = [1] * size
    for call in (
        lambda: transport.allgather(buffer, [3] * size),
        lambda: transport.allgather(buffer, [4] * (size + 1)),
        lambda: transport.reducescatter(buffer, [5] * size),
        lambda: transport.reducescatter(buffer, [-1, *ones[1:]]),
        lambda: transport.alltoall(buffer, [9] * size, ones),
        lambda: transport.broadcast(buffer, size),
        lambda: transport.broadcast(buffer, -1),
        lambda: transport.split([[]]),
        lambda: transport.split([[0, 0]]),
        lambda: transport.split([[size]]),
    ):
        with pytest.raises(ValueError, match=r"\d|not of"):
            call()


CHECKS: dict[str, Callable[[Transport], None]] = {
    check.__name__: check
    for check in (
        allreduce_every_dtype_and_op,
        what_is_not_defined_is_refused,
        allreduce_long,
        allreduce_leaves_its_neighbours_alone,
        reducescatter_even_and_uneven,
        allgather_even_and_uneven,
        allgather_of_memory_that_may_not_be_written,
        broadcast_from_each_root,
        alltoall_uneven,
        barrier_waits_for_the_last,
        halves_are_summed_in_float32,
        all_ranks_hold_the_same_bits,
        nan_and_inf_stay,
        subgroups_number_ranks_in_the_order_given,
        a_closed_transport_says_so,
        arguments_that_do_not_fit_are_refused,
    )
}
