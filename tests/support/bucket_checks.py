"""What the buckets of every transport must do: functions that run on all ranks and raise where they do not."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
from numbers_of_ranks import FLOATS, REDUCTIONS, buffer_of, expect, lengths, pattern, reduced, values_of

from hvdkit.transport.api import Transport
from hvdkit.transport.buckets import Buckets, BucketSpec, InPlaceSegment
from hvdkit.transport.buffer import Buffer, make_buffer
from hvdkit.transport.coding.api import Matrix
from hvdkit.transport.coding.blocks import Int8, Sign
from hvdkit.transport.coding.power_sgd import PowerSGD
from hvdkit.transport.coding.top_k import TopK

Wire = Literal["none", "float16", "bfloat16"]
WIRES: tuple[Wire, ...] = get_args(Wire)
NARROW: tuple[Wire, ...] = ("float16", "bfloat16")


def fill(buckets: Buckets, index: int, values: object) -> None:
    memory = buckets.memory[index]
    memory.array[:] = buffer_of(values, memory.dtype).array


def take(buckets: Buckets, index: int) -> Buffer:
    """A copy of the result."""
    memory = buckets.memory[index]
    return Buffer(memory.array.copy(), memory.dtype)


def reduce_all(buckets: Buckets) -> None:
    for index in range(len(buckets.memory)):
        buckets.start(index)
    for index in reversed(range(len(buckets.memory))):
        buckets.wait(index)
    assert not buckets.busy


def every_dtype_op_and_length(transport: Transport) -> None:
    rank, size = transport.rank, transport.size
    counts = [*lengths(size), 40_009]
    specs = [BucketSpec(dtype, count, op) for dtype, op in REDUCTIONS for count in counts]
    buckets = transport.open_buckets(specs)
    for memory, spec in zip(buckets.memory, specs, strict=True):
        assert (memory.dtype, memory.count) == (spec.dtype, spec.count)
    for _ in range(2):
        for index, spec in enumerate(specs):
            fill(buckets, index, pattern(rank, spec.count, spec.dtype, spec.op))
        reduce_all(buckets)
        for index, spec in enumerate(specs):
            expect(take(buckets, index), reduced(size, spec.count, spec.dtype, spec.op), str(spec))
    buckets.close()


def factors_before_and_after(transport: Transport) -> None:
    rank, size = transport.rank, transport.size
    specs = [
        BucketSpec(dtype, count, "sum", prescale, postscale, wire)
        for dtype in FLOATS
        for wire in WIRES
        for prescale, postscale in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.25), (0.5, 4.0))
        for count in (0, 1, size + 1, 1009)
    ]
    buckets = transport.open_buckets(specs)
    for generation in range(2):
        for index, spec in enumerate(specs):
            fill(buckets, index, pattern(rank, spec.count) + generation)
        reduce_all(buckets)
        for index, spec in enumerate(specs):
            expected = (reduced(size, spec.count) + generation * size) * spec.prescale * spec.postscale
            expect(take(buckets, index), expected, str(spec))
    buckets.close()


def numbers_that_stay_elsewhere(transport: Transport) -> None:
    """What only this rank reads may stay where it is, all of it or pieces, and is reduced there or to another place."""
    rank, size = transport.rank, transport.size
    specs = [
        BucketSpec(dtype, count, prescale=0.5, postscale=2.0)
        for dtype in FLOATS
        for count in (0, 1, size + 1, 1_009, 70_001, 400_009)
    ]
    buckets = transport.open_buckets(specs)
    dice = random.Random(rank)
    for _ in range(3):
        pieces: list[list[InPlaceSegment]] = []
        for index, spec in enumerate(specs):
            numbers = buffer_of(pattern(rank, spec.count), spec.dtype)
            start, stop = buckets.owned[index]
            edges = sorted(dice.sample(range(start, stop + 1), min(6, stop + 1 - start)))
            ranges = list(zip(edges[::2], edges[1::2], strict=False))
            if dice.random() < 0.3:
                ranges = [(start, stop)]
            memory = buckets.memory[index]
            memory.array[:] = numbers.array
            pieces.append([])
            for first, last in ranges:
                memory.array[first:last] = 77  # must not count
                source = Buffer(numbers.array[first:last].copy(), spec.dtype)
                target = source if dice.random() < 0.5 else make_buffer(source.count, spec.dtype)
                pieces[-1].append(InPlaceSegment(first, source, target))
            buckets.start(index, pieces[-1])
        for index, spec in enumerate(specs):
            buckets.wait(index)
            result = take(buckets, index)
            for one in pieces[index]:
                result.array[one.first : one.first + one.target.count] = one.target.array
            expect(result, reduced(size, spec.count), str(spec))
    buckets.close()


def generations_of_hasty_ranks(transport: Transport) -> None:
    """A rank fills its memory again as soon as it may, while a slow one is still reading the result."""
    rank, size = transport.rank, transport.size
    counts = (1, 5_003, 70_001)
    specs = [BucketSpec("float32", count, wire=wire) for count in counts for wire in WIRES]
    buckets = transport.open_buckets(specs)
    dice = random.Random(rank)
    for generation in range(8):
        for index, spec in enumerate(specs):
            fill(buckets, index, pattern(rank, spec.count) + generation)
            if dice.random() < 0.2:
                time.sleep(0.002)
            buckets.start(index)
        for index, spec in enumerate(specs):
            buckets.wait(index)
            if dice.random() < 0.2:
                time.sleep(0.002)
            expect(take(buckets, index), reduced(size, spec.count) + generation * size, f"{generation} {spec}")
    buckets.close()


def progress_by_whoever_has_time(transport: Transport) -> None:
    specs = [BucketSpec("float32", 20_011), BucketSpec("float16", 20_011), BucketSpec("float32", 3, wire="bfloat16")]
    buckets = transport.open_buckets(specs)
    for index, spec in enumerate(specs):
        fill(buckets, index, pattern(transport.rank, spec.count))
        buckets.start(index)
    deadline = time.monotonic() + 20
    while buckets.busy and time.monotonic() < deadline:
        buckets.advance()
        time.sleep(0)
    for index, spec in enumerate(specs):
        buckets.wait(index)
        expect(take(buckets, index), reduced(transport.size, spec.count))
    buckets.close()


def plans_and_collectives_side_by_side(transport: Transport) -> None:
    size = transport.size
    plans = [transport.open_buckets([BucketSpec("float64", 11), BucketSpec("bfloat16", 40_009)]) for _ in range(2)]
    for generation in range(3):
        for plan in plans:
            for index, memory in enumerate(plan.memory):
                fill(plan, index, pattern(transport.rank, memory.count))
                plan.start(index)
        buffer = buffer_of(np.full(50_000, transport.rank + generation), "float32")
        transport.allreduce(buffer)
        expect(buffer, np.full(50_000, sum(range(size)) + generation * size))
        for plan in reversed(plans):
            for index, memory in enumerate(plan.memory):
                plan.wait(index)
                expect(take(plan, index), reduced(size, memory.count))
    for plan in plans:
        plan.close()


def narrow_wires_are_near(transport: Transport) -> None:
    size = transport.size
    everyone = [np.random.default_rng(rank).standard_normal(30_011) for rank in range(size)]
    specs = [BucketSpec(dtype, 30_011, postscale=1 / size, wire=wire) for dtype in FLOATS for wire in WIRES]
    buckets = transport.open_buckets(specs)
    for index in range(len(specs)):
        fill(buckets, index, everyone[transport.rank])
    reduce_all(buckets)
    # One rounding of the numbers given, one of the sum: half a unit in the last place each.
    rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-23, "float64": 2.0**-52}
    largest = np.abs(np.stack(everyone)).mean(axis=0)
    for index, spec in enumerate(specs):
        result = take(buckets, index)
        unit = rounding[spec.dtype] + (rounding[spec.narrow] if spec.narrow != "none" else 0)
        error = np.abs(values_of(result) - np.mean(everyone, axis=0))
        assert (error <= 4 * unit * largest + 1e-7).all(), f"{spec}: {error.max()}"
    buckets.close()


def numbers_too_large_for_the_wire_are_clamped(transport: Transport) -> None:
    size = transport.size
    specs = [BucketSpec("float32", 4, "sum", 1.0, 1 / size, wire) for wire in NARROW]
    buckets = transport.open_buckets(specs)
    for index in range(len(specs)):
        fill(buckets, index, [1e20, -1e20, np.inf if transport.rank == 0 else 0.0, np.nan])
    reduce_all(buckets)
    for index, spec in enumerate(specs):
        result = take(buckets, index)
        values = values_of(result)
        assert np.isfinite(values[:2]).all() and values[0] == -values[1] >= 65504 / size, str(spec)
        assert values[2] == np.inf and np.isnan(values[3]), str(spec)
    buckets.close()


def all_ranks_get_the_same_bits(transport: Transport) -> None:
    generator = np.random.default_rng(transport.rank)
    specs = [BucketSpec(dtype, 10_007, postscale=1 / 3, wire=wire) for dtype in FLOATS for wire in WIRES]
    specs += [coded("float32", 10_007, coding, 5, postscale=1 / 3) for coding in CODINGS]
    buckets = transport.open_buckets(specs)
    for index in range(len(specs)):
        fill(buckets, index, generator.standard_normal(10_007))
    reduce_all(buckets)
    for index, spec in enumerate(specs):
        result = take(buckets, index)
        data = Buffer(result.array.view(np.uint8), "uint8")
        rows = transport.allgather(data, [data.count] * transport.size).array.reshape(transport.size, -1)
        assert (rows == rows[0]).all(), str(spec)
    buckets.close()


CODINGS = (TopK(0.1), TopK(1.0), Sign(), Int8(), PowerSGD(2))
#: By the number of elements that they fill.
MATRICES = {
    4_000: (Matrix(0, 40, 48), Matrix(1_920, 40, 52)),
    10_002: (Matrix(0, 48, 100), Matrix(4_800, 51, 102)),
    99_999: (Matrix(0, 271, 369),),
}


def coded(dtype: str, count: int, coding: Any, exact: int, **options: Any) -> BucketSpec:
    matrices = MATRICES[count - exact] if isinstance(coding, PowerSGD) else ()
    return BucketSpec(dtype, count, wire=coding, exact=exact, matrices=matrices, **options)


def coded_sums_arrive_in_time(transport: Transport) -> None:
    """What a round leaves out comes later: the results of many rounds add up to what was to be sent in them."""
    size, exact, rounds, count = transport.size, 3, 100, 4003
    numbers = [np.random.default_rng(rank).standard_normal(count) for rank in range(size)]
    mean = np.mean(numbers, axis=0)
    specs = [
        coded(dtype, count, coding, exact, prescale=0.5, postscale=2 / size)
        for coding in CODINGS
        for dtype in ("float32", "float64")
    ]
    buckets = transport.open_buckets(specs)
    totals = np.zeros((len(specs), count))
    for _ in range(rounds):
        for index in range(len(specs)):
            fill(buckets, index, numbers[transport.rank])
        reduce_all(buckets)
        for index in range(len(specs)):
            totals[index] += values_of(take(buckets, index))
    for spec, total in zip(specs, totals, strict=True):
        error = np.abs(total / rounds - mean)
        assert error[-exact:].max() < 1e-5, f"{spec}: what is not to be coded is off by {error[-exact:].max()}"
        assert np.linalg.norm(error) < 0.3 * np.linalg.norm(mean), f"{spec}: {np.linalg.norm(error)}"
        if spec.wire == TopK(1.0):
            assert error.max() < 1e-5, f"all numbers were to be sent, and one is off by {error.max()}"
    buckets.close()


def matrices_of_low_rank_are_sent_whole(transport: Transport) -> None:
    """Gradients of rank 2 and less, after others of less rank or of none: at rank 2 nothing is left out."""
    size, shapes = transport.size, [(40, 30), (16, 90), (50, 50)]
    starts = [0, 1_216, 2_688]  # with gaps
    matrices = tuple(Matrix(start, *shape) for start, shape in zip(starts, shapes, strict=True))
    buckets = transport.open_buckets([BucketSpec("float32", 5_192, wire=PowerSGD(2), exact=4, matrices=matrices)])
    for step, rank in enumerate((1, 2, 0, 1, 0, 2, 2)):
        dice = np.random.default_rng(step)
        everyone = np.zeros((size, 5_192))
        everyone[:, -4:] = 1 + np.arange(4)
        for matrix in matrices:
            left, right = dice.standard_normal((matrix.rows, rank)), dice.standard_normal((size, rank, matrix.columns))
            everyone[:, matrix.start :][:, : matrix.rows * matrix.columns] = (left @ right).reshape(size, -1)
        fill(buckets, 0, everyone[transport.rank])
        reduce_all(buckets)
        error = np.abs(values_of(take(buckets, 0)) - everyone.sum(axis=0))
        assert error[-4:].max() == 0, f"step {step}: {error[-4:]}"
        for matrix in matrices:  # a sum is some 100 long; one direction of two that is not found costs about half
            length = np.linalg.norm(error[matrix.start :][: matrix.rows * matrix.columns])
            assert length < 1, f"step {step}, {matrix}: {length}"
    buckets.close()


def a_round_that_is_not_finite_leaves_no_trace(transport: Transport) -> None:
    """It is summed as without coding, and what comes after is the same bits as if it had never been."""
    count, exact = 4003, 3
    specs = [coded(dtype, count, coding, exact) for coding in CODINGS for dtype in ("float32", "float64")]
    plans = [transport.open_buckets(specs) for _ in range(2)]
    numbers = np.random.default_rng(transport.rank).standard_normal((5, count))
    for step in range(5):
        if step == 2:  # one plan only: inf on one rank, NaN on another, in every rank's shard
            given = pattern(transport.rank, count).astype(np.float64)
            expected = reduced(transport.size, count).astype(np.float64)
            for rank, value in ((0, np.inf), (transport.size - 1, np.nan)):
                expected[5 + rank :: 100] += value
                if transport.rank == rank:
                    given[5 + rank :: 100] = value
            for index in range(len(specs)):
                fill(plans[0], index, given)
            reduce_all(plans[0])
            for index, spec in enumerate(specs):
                expect(take(plans[0], index), expected, str(spec))
        for plan in plans:
            for index in range(len(specs)):
                fill(plan, index, numbers[step])
            reduce_all(plan)
        for index, spec in enumerate(specs):
            one, two = (take(plan, index).array for plan in plans)
            assert np.isfinite(one).all() and (one == two).all(), f"step {step}: {spec}"
    for plan in plans:
        plan.close()


def codings_send_less(transport: Transport) -> None:
    def sent(wire: Any) -> int:
        buckets = transport.open_buckets([coded("float32", 100_000, wire, 1)])
        nbytes = buckets.sent_bytes
        buckets.close()
        return nbytes

    plain = sent("none")
    assert sent("float16") == plain // 2
    for coding, part in ((TopK(0.01), 1 / 40), (Sign(), 1 / 30), (Int8(), 1 / 3.8), (PowerSGD(2), 1 / 25)):
        assert sent(coding) <= plain * part + 8, f"{coding}: {sent(coding)} of {plain}"


def halves_are_summed_in_float32(transport: Transport) -> None:
    cases = (("float16", 2048.0), ("bfloat16", 256.0))
    buckets = transport.open_buckets([BucketSpec(dtype, 1_001) for dtype, _ in cases])
    for index, (_, large) in enumerate(cases):
        fill(buckets, index, np.full(1_001, large if transport.rank == 0 else 0.75))
    reduce_all(buckets)
    for index, (dtype, large) in enumerate(cases):
        result = take(buckets, index)
        expected = values_of(buffer_of([large + 0.75 * (transport.size - 1)], dtype))
        # Between hosts each host's sum travels in the bucket's own dtype, which rounds it a second time.
        unit = 2.0 if transport.name == "hierarchical" else 0.0
        np.testing.assert_allclose(values_of(result), np.repeat(expected, 1_001), rtol=0, atol=unit)
    buckets.close()


BUCKET_CHECKS: dict[str, Callable[[Transport], None]] = {
    f"buckets_{check.__name__}": check
    for check in (
        every_dtype_op_and_length,
        factors_before_and_after,
        numbers_that_stay_elsewhere,
        generations_of_hasty_ranks,
        progress_by_whoever_has_time,
        plans_and_collectives_side_by_side,
        narrow_wires_are_near,
        numbers_too_large_for_the_wire_are_clamped,
        all_ranks_get_the_same_bits,
        halves_are_summed_in_float32,
        coded_sums_arrive_in_time,
        a_round_that_is_not_finite_leaves_no_trace,
        codings_send_less,
        matrices_of_low_rank_are_sent_whole,
    )
}
