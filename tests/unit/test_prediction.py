"""The prediction of a step on many hosts: what must hold whatever the numbers are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.profiling.prediction import (
    MODELS,
    Cluster,
    Work,
    fit_overlap,
    predict_scaling,
    predict_step,
    reduce_s,
    slowest_of,
)
from hvdkit.transport.between.select import ALGORITHMS, Link

LINK = Link(latency_s=50e-6, byte_s=8e-9, message_s=5e-6)
WORK = Work(compute_s=0.046, backward_s=0.030, buckets=[8.4e6] * 4)

seconds = st.floats(1e-6, 1.0)
works = st.builds(
    lambda forward, backward, buckets: Work(forward + backward, backward, buckets),
    seconds,
    seconds,
    st.lists(st.floats(1, 1e8), min_size=1, max_size=8),
)
links = st.builds(Link, st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-7), st.floats(0, 1e-4))
clusters = st.builds(
    Cluster, links, st.integers(1, 8), st.floats(0, 1e-9), st.floats(0, 1), st.sampled_from(["", *MODELS])
)


@given(works, clusters, st.integers(1, 4096))
def test_a_step_is_neither_faster_than_compute_nor_slower_than_all_in_turn(
    work: Work, cluster: Cluster, hosts: int
) -> None:
    one = predict_step(work, cluster, hosts)
    assert one.step_s == pytest.approx(one.compute_s + one.late_s + one.exposed_s)
    assert -1e-12 <= one.exposed_s <= one.communication_s * (1 + 1e-9)
    assert 0 < one.efficiency <= 1


@given(works, clusters, st.integers(2, 4096), st.floats(0, 1))
def test_more_overlap_is_never_slower_and_is_found_again(
    work: Work, cluster: Cluster, hosts: int, overlap: float
) -> None:
    steps = [predict_step(work, replace(cluster, overlap=one), hosts) for one in (0.0, overlap, 1.0)]
    assert steps[0].step_s >= steps[1].step_s - 1e-9 >= steps[2].step_s - 2e-9
    found = replace(cluster, overlap=fit_overlap(work, cluster, hosts, steps[1].step_s))
    assert predict_step(work, found, hosts).step_s == pytest.approx(steps[1].step_s, abs=1e-9)


@given(works, links, st.integers(2, 4096))
def test_no_algorithm_is_predicted_to_beat_the_cheapest(work: Work, link: Link, hosts: int) -> None:
    best = predict_step(work, Cluster(link), hosts).communication_s
    assert all(best <= predict_step(work, Cluster(link, algorithm=name), hosts).communication_s for name in ALGORITHMS)


def test_one_bucket_hides_nothing_and_many_small_ones_all_but_the_last() -> None:
    whole = predict_step(replace(WORK, buckets=[33.6e6]), Cluster(LINK), 2)
    assert whole.exposed_s == pytest.approx(whole.communication_s)
    fast = Cluster(Link(1e-6, 1e-10))
    cut = predict_step(WORK, fast, 2)
    assert cut.exposed_s == pytest.approx(reduce_s(fast, 2, 8.4e6))


def test_a_slow_wire_is_busy_from_the_first_bucket_on() -> None:
    """What is exposed then is all of the wire's time but what backward leaves after the first bucket."""
    one = predict_step(WORK, Cluster(LINK), 2)
    assert one.exposed_s == pytest.approx(one.communication_s - 0.75 * WORK.backward_s)


def test_ranks_of_one_host_pay_for_memory_only() -> None:
    assert predict_step(WORK, Cluster(LINK), 1).step_s == WORK.compute_s
    both = Cluster(LINK, ranks_per_host=2, local_byte_s=1e-10)
    assert predict_step(WORK, both, 1).communication_s == pytest.approx(33.6e6 * 1e-10)
    between = predict_step(WORK, Cluster(LINK), 4).communication_s
    assert predict_step(WORK, both, 4).communication_s == pytest.approx(between + 33.6e6 * 1e-10)


def test_the_slowest_of_many_ranks_counts() -> None:
    assert slowest_of(1) == 0.0
    assert slowest_of(2) == pytest.approx(0.564, abs=0.03)  # 1 / sqrt(pi)
    assert slowest_of(1000) == pytest.approx(3.24, abs=0.02)
    jittery = replace(WORK, jitter_s=0.002)
    late = [one.late_s for one in predict_scaling(jittery, Cluster(LINK, ranks_per_host=2), [1, 2, 4, 4096])]
    assert late == sorted(late) and late[0] > 0


def test_bytes_alone_keep_a_ring_from_growing() -> None:
    """On a link without latency a ring of any number of hosts takes less than twice what the bytes take."""
    link = Link(0.0, 1e-9)
    steps = predict_scaling(Work(0.01, 0.0, [1e8]), Cluster(link, algorithm="ring"), [2, 64, 4096])
    assert [one.communication_s for one in steps] == pytest.approx([0.1, 0.196875, 0.19995], rel=1e-3)


def test_no_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match="number of hosts is 0"):
        predict_step(WORK, Cluster(LINK), 0)
