"""The choice between algorithms: the cheapest by what was measured, the same from the same numbers."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.errors import TransportError
from hvdkit.transport.between.select import ALGORITHMS, MESSAGE_BYTES, NAMES, BetweenHosts, Link, Measured, cheapest
from hvdkit.transport.buckets import BucketSpec

ABLE = ("library", *ALGORITHMS)
links = st.builds(Link, st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-6), st.floats(0, 1e-3))
hosts = st.integers(2, 200)
sizes = st.integers(0, 1 << 30)
points = st.lists(
    st.tuples(st.integers(8, 1 << 24), st.floats(1e-6, 10)), min_size=1, max_size=4, unique_by=lambda p: p[0]
)
measurements = st.builds(Measured, hosts, links, points.map(lambda found: tuple(sorted(found))))

# 1 Gbit/s, 50 us
ETHERNET = Link(50e-6, 8.35e-9, 5e-6)


@given(links, hosts, sizes)
def test_the_cheapest_is_the_minimum(link: Link, hosts: int, nbytes: int) -> None:
    chosen = cheapest(link, hosts, nbytes)
    assert ALGORITHMS[chosen](link, hosts, nbytes) == min(one(link, hosts, nbytes) for one in ALGORITHMS.values())


@given(measurements, sizes)
def test_the_fastest_is_the_minimum_of_what_may_be_taken(measured: Measured, nbytes: int) -> None:
    for among in (ABLE, ("library", "pieces"), ("halving",)):
        chosen = measured.fastest(nbytes, among)
        assert measured.seconds(chosen, nbytes) == min(measured.seconds(name, nbytes) for name in among)


@given(measurements, sizes)
def test_ranks_with_the_same_numbers_choose_alike(measured: Measured, nbytes: int) -> None:
    told = pickle.loads(pickle.dumps(measured))
    assert told == measured and told.fastest(nbytes, ABLE) == measured.fastest(nbytes, ABLE)


@given(links, hosts, st.integers(1, 1 << 30))
def test_more_bytes_never_cost_less(link: Link, hosts: int, nbytes: int) -> None:
    assert all(one(link, hosts, nbytes) >= one(link, hosts, nbytes // 2) for one in ALGORITHMS.values())


@given(links, st.integers(3, 200))
def test_much_to_send_goes_in_pieces_rather_than_whole(link: Link, hosts: int) -> None:
    much = 1000 * hosts * (link.latency_s + link.message_s) / link.byte_s
    assert ALGORITHMS["pieces"](link, hosts, much) <= ALGORITHMS["doubling"](link, hosts, much)


def test_a_choice_that_can_be_read() -> None:
    slow_library = ((8, 1.0), (1 << 20, 2.0))
    assert Measured(2, ETHERNET, slow_library).table(ABLE) == [(0, "doubling")]
    assert Measured(4, ETHERNET, slow_library).table(ABLE) == [(0, "doubling"), (8192, "pieces")]
    assert Measured(64, ETHERNET, slow_library).table(ABLE)[-1][1] in ("halving", "pieces")


def test_the_library_is_taken_where_it_wins() -> None:
    measured = Measured(4, ETHERNET, ((8, 1e-6), (60_000, 2e-6), (1 << 20, 10.0)))
    assert measured.fastest(1000, ABLE) == "library" and measured.fastest(1 << 20, ABLE) != "library"


@given(points, st.integers(0, 1 << 25))
def test_the_librarys_time_goes_through_what_was_measured(found: list[tuple[int, float]], nbytes: int) -> None:
    measured = Measured(4, ETHERNET, tuple(sorted(found)))
    assert measured.seconds("library", nbytes) >= 0
    for size, seconds in found:
        assert measured.seconds("library", size) == pytest.approx(seconds)


@given(measurements, sizes)
def test_the_library_is_no_faster_than_the_link_beyond_what_was_measured(measured: Measured, nbytes: int) -> None:
    size, seconds = measured.library_samples[-1]
    least = measured.link.byte_s * (nbytes - size)  # each host sends half of it and more, and gets as much
    assert nbytes <= size or measured.seconds("library", nbytes) >= seconds + least * 0.999


def test_an_outlier_among_small_sizes_does_not_make_the_library_win_at_large_ones() -> None:
    measured = Measured(2, ETHERNET, ((8, 0.048), (60_000, 0.037)))
    assert measured.fastest(1 << 24, ABLE) != "library"


def test_a_handshake_of_the_library_counts_from_where_it_begins() -> None:
    # Two hosts, 2 ms: one latency up to 60 kB, three from 64 KiB on.
    slow = Link(2e-3, 1e-9, 5e-6)
    measured = Measured(2, slow, ((8, 2.0e-3), (60_000, 2.05e-3), (1 << 16, 6.1e-3), (6_000_000, 12e-3)))
    assert measured.fastest(50_000, ABLE) == "library" and measured.fastest(1 << 16, ABLE) == "doubling"


@given(links)
def test_messages_are_as_small_as_they_may_be(link: Link) -> None:
    size = link.message_bytes
    assert size in MESSAGE_BYTES
    smaller = [one for one in MESSAGE_BYTES if one < size]
    assert all(one * link.byte_s < 10 * link.message_s * 1.001 for one in smaller)


def between(algorithm: str, hosts: int, able: tuple[str, ...] = ABLE) -> BetweenHosts:
    made = BetweenHosts(algorithm, able, hosts)
    made.measured = Measured(hosts, ETHERNET, ((8, 1.0),))
    return made


@given(st.sampled_from(NAMES), hosts, sizes, st.sampled_from(["float32", "int64", "float16", "bfloat16"]))
def test_what_is_taken_fits_the_dtype(name: str, hosts: int, nbytes: int, dtype: str) -> None:
    made = between(name, hosts)
    assert made.pick(dtype, nbytes) in made.supported_for(dtype)
    if name in made.supported_for(dtype):
        assert made.pick(dtype, nbytes) == name


def test_a_wish_that_would_round_partial_sums_is_refused() -> None:
    narrow = [BucketSpec("float32", 9, wire="float16")]
    with pytest.raises(TransportError, match=r"halving.*float16.*4 hosts.*pieces"):
        between("halving", 4).check(narrow)
    with pytest.raises(TransportError, match="doubling"):
        between("doubling", 3).check([BucketSpec("bfloat16", 9)])
    for name, hosts in (("doubling", 2), ("pieces", 4), ("library", 4), ("auto", 4)):
        between(name, hosts).check(narrow)
    between("halving", 4).check([BucketSpec("float32", 9)])


def test_integers_do_not_travel_narrow() -> None:
    with pytest.raises(TransportError, match="int32 bucket cannot be sent as float16"):
        between("auto", 4).check([BucketSpec("int32", 9, wire="float16")])


def test_a_wish_that_gloo_cannot_meet_is_refused() -> None:
    with pytest.raises(TransportError, match=r"HVDKIT_ALGORITHM=halving.*Gloo.*library, pieces"):
        between("halving", 4, ("library", "pieces")).check([])
    between("pieces", 4, ("library", "pieces")).check([])


def test_it_says_what_it_takes() -> None:
    assert between("auto", 4).describe() == "958 Mbit/s and 50 us between hosts, doubling, pieces from 8 KiB on"
    assert between("halving", 4).describe() == "958 Mbit/s and 50 us between hosts, halving"
