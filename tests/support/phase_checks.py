"""What the two phases of the buckets of every transport must do, each alone and in sequence; see bucket_checks."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from bucket_checks import CODINGS, WIRES, coded, fill, reduce_all, take
from numbers_of_ranks import FLOATS, REDUCTIONS, expect, lengths, pattern, reduced

from hvdkit.transport.api import Transport
from hvdkit.transport.buckets import Buckets, BucketSpec, InPlaceSegment
from hvdkit.transport.buffer import as_buffer
from hvdkit.transport.small_collectives import gather_bytes, gather_ints


def run_phase(buckets: Buckets, phase: Callable[[int], None]) -> None:
    for index in range(len(buckets.memory)):
        phase(index)
    for index in reversed(range(len(buckets.memory))):
        buckets.wait(index)
    assert not buckets.busy


def every_element_has_one_owner(transport: Transport) -> None:
    """Shards are disjoint, cover the bucket, and hold their part of the sum after a reduce-scatter."""
    rank, size = transport.rank, transport.size
    specs = [BucketSpec(dtype, count, op) for dtype, op in REDUCTIONS for count in (*lengths(size), 40_009)]
    buckets = transport.open_buckets(specs)
    for index, spec in enumerate(specs):
        fill(buckets, index, pattern(rank, spec.count, spec.dtype, spec.op))
    run_phase(buckets, buckets.reduce_scatter)
    for index, spec in enumerate(specs):
        start, stop = buckets.shard[index]
        expect(buckets.memory[index].slice(start, stop), reduced(size, spec.count, spec.dtype, spec.op)[start:stop])
        if stop > start and buckets.owned[index] != (0, 0):
            assert buckets.owned[index][0] <= start and stop <= buckets.owned[index][1]
    starts, stops = (gather_ints(transport, edge) for edge in buckets.shard[-1])
    shards = sorted(shard for shard in zip(starts, stops, strict=True) if shard[0] < shard[1])
    assert shards[0][0] == 0 and shards[-1][1] == 40_009
    assert all(before[1] == after[0] for before, after in itertools.pairwise(shards))
    run_phase(buckets, buckets.all_gather)
    for index, spec in enumerate(specs):
        expect(take(buckets, index), reduced(size, spec.count, spec.dtype, spec.op), str(spec))
    buckets.close()


def both_phases_are_the_allreduce(transport: Transport) -> None:
    """To the bit where the allreduce adds in the order of ranks, too, and does not round the sum for the wire."""
    count = 50_021
    numbers = np.random.default_rng(transport.rank).standard_normal(count)
    options: dict[str, Any] = {"prescale": 0.3, "postscale": 1 / 3}
    specs = [BucketSpec(dtype, count, algorithm="pieces", **options) for dtype in FLOATS]
    specs += [coded(dtype, 10_007, coding, 5, **options) for coding in CODINGS for dtype in ("float32", "float64")]
    exact = len(specs)
    specs += [BucketSpec("float32", count, wire=wire, **options) for wire in WIRES]
    plans = [transport.open_buckets(specs) for _ in range(2)]
    for _ in range(2):  # codings remember what they have left out
        for buckets in plans:
            for index, spec in enumerate(specs):
                fill(buckets, index, numbers[: spec.count])
        reduce_all(plans[0])
        run_phase(plans[1], plans[1].reduce_scatter)
        run_phase(plans[1], plans[1].all_gather)
        for index, spec in enumerate(specs):
            fused, phased = (take(buckets, index).array for buckets in plans)
            if index < exact:
                assert fused.tobytes() == phased.tobytes(), str(spec)
            else:
                np.testing.assert_allclose(phased, fused, rtol=2.0**-7, atol=1e-6, err_msg=str(spec))
            assert len(set(gather_bytes(transport, phased.tobytes()))) == 1, str(spec)
    for buckets in plans:
        buckets.close()


def a_changed_shard_reaches_all(transport: Transport) -> None:
    """Steps of a sharded optimizer: all ranks get what the owners made of the sums, whatever else is in memory."""
    rank, size, count = transport.rank, transport.size, 20_011
    specs = [BucketSpec(dtype, count, wire=wire) for dtype in ("float32", "float64") for wire in WIRES]
    buckets = transport.open_buckets(specs)
    for step in range(4):
        expected = pattern(0, count)
        if step:  # the first round is an all-gather alone, as of parameters that one rank has read
            for index in range(len(specs)):
                fill(buckets, index, pattern(rank, count) + step)
            run_phase(buckets, buckets.reduce_scatter)
            expected = reduced(size, count) + step * size
        for memory, (start, stop) in zip(buckets.memory, buckets.shard, strict=True):
            shard = memory.array[start:stop] if step else expected[start:stop].astype(memory.array.dtype)
            memory.array[:], shard = np.nan, shard * 2 + 1e5 + 1 / 3  # which float16 does not hold
            memory.array[start:stop] = shard
        run_phase(buckets, buckets.all_gather)
        for index, memory in enumerate(buckets.memory):
            expect(take(buckets, index), expected.astype(memory.array.dtype) * 2 + 1e5 + 1 / 3, str(specs[index]))
    buckets.close()


def what_lies_elsewhere_is_reduced_and_given_from_there(transport: Transport) -> None:
    """In-place segments of each phase, where the transport has them, with memory before and behind that is not."""
    rank, size, count = transport.rank, transport.size, 100_003
    buckets = transport.open_buckets([BucketSpec("float32", count)])
    shard = buckets.shard[0]
    has_any = transport.between is None and buckets.owned[0] == shard and shard[1] > shard[0] + 8
    start, stop = (shard[0] + 3, shard[1] - 5) if has_any else (shard[0], shard[0])
    for step in range(2):
        numbers = (pattern(rank, count) + step).astype(np.float32)
        result = np.empty_like(numbers[start:stop])
        fill(buckets, 0, numbers)
        memory = buckets.memory[0].array
        memory[start:stop] = np.nan
        buckets.reduce_scatter(0, [InPlaceSegment(start, as_buffer(numbers[start:stop]), as_buffer(result))])
        buckets.wait(0)
        expected = (reduced(size, count) + step * size).astype(np.float32)
        own = np.concatenate([memory[shard[0] : start], result, memory[stop : shard[1]]])
        np.testing.assert_array_equal(own, expected[shard[0] : shard[1]])
        changed = as_buffer(result * 2)
        memory[:] = np.nan
        memory[shard[0] : start], memory[stop : shard[1]] = 2 * own[: start - shard[0]], 2 * own[stop - shard[0] :]
        buckets.all_gather(0, [InPlaceSegment(start, changed, changed)])
        buckets.wait(0)
        memory[start:stop] = changed.array
        expect(take(buckets, 0), 2 * expected)
    buckets.close()


def phases_and_allreduces_in_one_plan(transport: Transport) -> None:
    """In any order that all ranks have, several in flight, fewer pieces of memory than buckets, ranks that dawdle."""
    rank, size, depth = transport.rank, transport.size, 3
    counts = (5_003, 1, 70_001, 13, 0, 40_009, 997)
    specs = [BucketSpec("float32", count, wire=WIRES[at % 2]) for at, count in enumerate(counts)]
    buckets = transport.open_buckets(specs, depth)
    together, dice = random.Random(5), random.Random(rank)
    for step in range(6):
        for first in range(0, len(specs), depth):
            some = list(range(first, min(first + depth, len(specs))))
            phased = [index for index in some if together.random() < 0.6]
            for index in some:
                fill(buckets, index, pattern(rank, counts[index]) + step)
                if dice.random() < 0.2:
                    time.sleep(0.002)
                (buckets.reduce_scatter if index in phased else buckets.start)(index)
            together.shuffle(phased)
            for index in phased:
                buckets.wait(index)
                buckets.all_gather(index)  # while other buckets are still being reduced
            dice.shuffle(some)
            for index in some:
                buckets.wait(index)
                expect(take(buckets, index), reduced(size, counts[index]) + step * size, f"{step} {specs[index]}")
    assert not buckets.busy
    buckets.close()


def a_bucket_under_way_is_not_begun_again(transport: Transport) -> None:
    buckets = transport.open_buckets([BucketSpec("float32", 100)])
    fill(buckets, 0, pattern(transport.rank, 100))
    buckets.reduce_scatter(0)
    if not buckets.finished(0):
        for begin in (buckets.start, buckets.reduce_scatter, buckets.all_gather):
            with pytest.raises(RuntimeError, match=r"call wait\(0\) first"):
                begin(0)
    buckets.wait(0)
    buckets.all_gather(0)
    buckets.wait(0)
    expect(take(buckets, 0), reduced(transport.size, 100))
    buckets.close()


PHASE_CHECKS: dict[str, Callable[[Transport], None]] = {
    f"phases_{check.__name__}": check
    for check in (
        every_element_has_one_owner,
        both_phases_are_the_allreduce,
        a_changed_shard_reaches_all,
        what_lies_elsewhere_is_reduced_and_given_from_there,
        phases_and_allreduces_in_one_plan,
        a_bucket_under_way_is_not_begun_again,
    )
}
