"""Every algorithm between hosts: what it reduces is right and the same bits everywhere, whatever the transport."""

from __future__ import annotations

import numpy as np
import pytest
from bucket_checks import fill, reduce_all, take
from numbers_of_ranks import REDUCTIONS, buffer_of, expect, lengths, pattern, reduced
from ranks import run_ranks

from hvdkit.errors import TransportError
from hvdkit.transport.api import Transport
from hvdkit.transport.between.select import MESSAGE_BYTES, BetweenHosts, Measured
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.buffer import Buffer
from hvdkit.transport.small_collectives import gather_bytes

pytestmark = pytest.mark.ranks

PER_MESSAGE = MESSAGE_BYTES[0] // 4  # elements of float32


def _between(transport: Transport) -> BetweenHosts:
    assert transport.between is not None
    return transport.between


def every_algorithm_is_right(transport: Transport) -> list[str]:
    """Sums of all kinds, and long ones that end at, before and after the edge of a segment."""
    between, rank, size = _between(transport), transport.rank, transport.size
    edge = PER_MESSAGE * between.hosts
    long = [BucketSpec("float32", count, prescale=0.5, postscale=2.0) for count in (edge - 1, edge, 2 * edge + 1)]
    narrow = [BucketSpec("float32", edge + 7, postscale=0.5, wire="float16"), BucketSpec("float64", 9, wire="bfloat16")]
    short = [BucketSpec(dtype, count, op) for dtype, op in REDUCTIONS for count in lengths(size)]
    for algorithm in between.able:
        between.algorithm = algorithm
        specs = [one for one in (*short, *long, *narrow) if algorithm in between.supported_for(one.wire_dtype)]
        buckets = transport.open_buckets(specs, depth=7)
        for start in range(0, len(specs), 7):
            some = range(start, min(start + 7, len(specs)))
            for index in some:
                fill(buckets, index, pattern(rank, specs[index].count, specs[index].dtype, specs[index].op))
                buckets.start(index)
            for index in some:
                buckets.wait(index)
                spec = specs[index]
                expected = reduced(size, spec.count, spec.dtype, spec.op)
                if spec.postscale != 1.0:
                    expected = expected * spec.prescale * spec.postscale
                expect(take(buckets, index), expected, f"{algorithm} {spec}")
        buckets.close()
    between.algorithm = "auto"
    return list(between.able)


def every_algorithm_gives_the_same_bits(transport: Transport) -> None:
    between = _between(transport)
    numbers = np.random.default_rng(transport.rank).standard_normal(2 * PER_MESSAGE * between.hosts + 5)
    specs = [BucketSpec("float32", numbers.size, postscale=1 / 3, wire=wire) for wire in ("none", "float16")]
    for algorithm in between.able:
        between.algorithm = algorithm
        supported_for = [one for one in specs if algorithm in between.supported_for(one.wire_dtype)]
        buckets = transport.open_buckets(supported_for)
        for index in range(len(supported_for)):
            fill(buckets, index, numbers)
        reduce_all(buckets)
        for index in range(len(supported_for)):
            assert len(set(gather_bytes(transport, take(buckets, index).array.tobytes()))) == 1, algorithm
        buckets.close()
    between.algorithm = "auto"


def all_ranks_know_the_same(transport: Transport) -> None:
    if _between(transport).measured is None:  # flat transports measure when they first have something to send
        transport.open_buckets([BucketSpec("float32", 1)]).close()
    between = _between(transport)
    told = gather_bytes(transport, repr(between.measured).encode())
    assert len(set(told)) == 1 and between.measured is not None
    measured: Measured = between.measured
    assert measured.hosts == between.hosts and measured.link.latency_s > 0 and measured.link.byte_s > 0
    sizes = [size for size, _ in measured.library_samples]
    assert sizes == sorted(set(sizes)) and {MESSAGE_BYTES[0], 1 << 16} <= set(sizes), "before and behind a handshake"


def a_wish_that_cannot_be_met_is_refused(transport: Transport) -> None:
    between = _between(transport)
    between.algorithm = "halving"
    with pytest.raises(TransportError, match="HVDKIT_ALGORITHM=halving"):
        transport.open_buckets([BucketSpec("float32", 9, wire="float16")])
    between.algorithm = "auto"


def what_is_not_a_plan_goes_on(transport: Transport) -> None:
    """An allreduce by name is no bucket of a plan: one of 16 bits is summed in pieces, whatever plans go by."""
    between = _between(transport)
    between.algorithm = "halving" if "halving" in between.able else "library"
    for dtype in ("float16", "float32"):
        numbers = buffer_of(pattern(transport.rank, 50_001), dtype)
        transport.allreduce(numbers)
        expect(numbers, reduced(transport.size, 50_001), dtype)
    between.algorithm = "auto"


def a_group_has_its_parents_wish(transport: Transport) -> None:
    _between(transport).algorithm = "library"
    group = transport.split([range(transport.size)])
    assert group is not None and _between(group).algorithm == "library"
    group.close()
    _between(transport).algorithm = "auto"


def all_of_it(transport: Transport) -> list[str]:
    all_ranks_know_the_same(transport)
    able = every_algorithm_is_right(transport)
    every_algorithm_gives_the_same_bits(transport)
    a_wish_that_cannot_be_met_is_refused(transport)
    what_is_not_a_plan_goes_on(transport)
    a_group_has_its_parents_wish(transport)
    return able


MPI = {"library", "doubling", "halving", "pieces"}


@pytest.mark.parametrize(
    "size, transport, able",
    [
        pytest.param(2, "mpi", MPI, marks=pytest.mark.slow),
        (3, "mpi", MPI),
        pytest.param(5, "mpi", MPI, marks=pytest.mark.slow),
        pytest.param(4, "hierarchical_round_robin", MPI, marks=pytest.mark.slow),
        pytest.param(4, "hierarchical_uneven", MPI, marks=pytest.mark.slow),
        pytest.param(3, "gloo", {"library", "pieces"}, marks=pytest.mark.slow),
    ],
)
def test_every_algorithm_of_a_transport(size: int, transport: str, able: set[str]) -> None:
    assert all(set(found) == able for found in run_ranks(size, all_of_it, transport=transport))


def as_many_bytes_cross_as_the_tuner_thinks(transport: Transport) -> None:
    count = 2**12
    buckets = transport.open_buckets([BucketSpec("float32", count)])
    if buckets.sent_bytes:  # some ranks stand beside
        assert buckets.sent_bytes == 4 * count // transport.shards
    buckets.close()


@pytest.mark.parametrize("transport", ["hierarchical_pairs", "hierarchical_uneven", "mpi"])
def test_a_sum_crosses_in_as_many_shards_as_every_host_has_ranks(transport: str) -> None:
    run_ranks(4, as_many_bytes_cross_as_the_tuner_thinks, transport=transport)


def more_than_a_window(transport: Transport) -> None:
    """More segments than may be under way at once, of buckets that are under way together."""
    between = _between(transport)
    count = 70 * PER_MESSAGE * transport.size + 3
    for algorithm in ("halving", "doubling"):
        between.algorithm = algorithm
        buckets = transport.open_buckets([BucketSpec("float32", count)] * 2)
        for index in range(2):
            fill(buckets, index, pattern(transport.rank, count) + index)
        reduce_all(buckets)
        for index in range(2):
            expect(take(buckets, index), reduced(transport.size, count) + index * transport.size)
        buckets.close()
    between.algorithm = "auto"


@pytest.mark.slow
def test_a_bucket_of_many_segments() -> None:
    run_ranks(3, more_than_a_window, transport="mpi")


def test_a_narrow_sum_of_two_is_not_rounded_again() -> None:
    """Each of two hosts adds what both have sent, and needs no rounded sum to send on."""
    run_ranks(2, _one_large_one_small, transport="mpi")


def _one_large_one_small(transport: Transport) -> None:
    _between(transport).algorithm = "doubling"
    buckets = transport.open_buckets([BucketSpec("float32", 5, wire="float16")])
    fill(buckets, 0, np.full(5, 2048.0 if transport.rank else 0.75))
    reduce_all(buckets)
    result: Buffer = take(buckets, 0)
    expect(result, np.full(5, 2048.75))
    buckets.close()
    _between(transport).algorithm = "auto"
