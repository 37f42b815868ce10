"""The scaling model's fit: it finds what measurements were made from, and says where it is off."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scaling_drawn import DRAWN, GIGABITS, HOSTS, REFERENCES, draw_page, horovod, predict_drawn
from benchmarks.scaling_fit import Fitted, Point, check_largest, fit, hold_out, summarise
from benchmarks.scaling_model import Measurements, fit_steps, show_checks
from hvdkit.profiling.prediction import Cluster, Work, predict_step
from hvdkit.transport.between.select import ALGORITHMS, Link

CLUSTER = Cluster(Link(latency_s=40e-6, byte_s=8.5e-9, message_s=10e-6), start_s=50e-6)
SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
CORES = 2
HERE = Fitted(CLUSTER, turn_s=100e-6, cores=CORES)


def made_from(fitted: Fitted) -> list[Point]:
    """What the model says, as if it had been measured."""
    plain = [Point(name, hosts, size, 0.0) for name in ALGORITHMS for hosts in (2, 3, 4) for size in SIZES]
    return [replace(one, seconds=fitted.predict(one)) for one in plain]


@settings(max_examples=30)
@given(st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-7), *[st.floats(0, 1e-4)] * 3)
def test_the_fit_tells_what_the_points_were_made_from(
    latency: float, byte: float, message: float, start: float, turn: float
) -> None:
    points = made_from(Fitted(Cluster(Link(latency, byte, message), start_s=start), turn, CORES))
    found = fit(points, CORES)
    assert all(found.predict(one) == pytest.approx(one.seconds, rel=1e-3) for one in points)
    assert found.cluster.link.byte_s == pytest.approx(byte, rel=0.01) or 64 * 2**20 * byte < latency


def test_what_is_held_out_is_told_and_what_is_odd_is_a_miss() -> None:
    points = made_from(HERE)
    checks = [*hold_out(points, CORES, lambda one: one.nbytes, "size"), *check_largest(points, CORES)]
    assert len(checks) == len(points) + len(points) // 3
    assert all(one.met and abs(one.error) < 1e-6 for one in checks)
    odd = [replace(one, seconds=2 * one.seconds) if one.nbytes == SIZES[2] else one for one in points]
    missed = [one for one in hold_out(odd, CORES, lambda one: one.nbytes, "size") if not one.met]
    assert {one.what.split(", ")[1] for one in missed} >= {"1 MiB"}
    assert "missed" in show_checks(missed) and summarise(missed).startswith("0 of ")


def test_no_points_are_refused() -> None:
    with pytest.raises(ValueError, match="no points"):
        fit([], CORES)


def test_hosts_that_share_cores_wait_for_their_turn() -> None:
    assert HERE.here(2) == CLUSTER
    assert HERE.here(3).link.latency_s == HERE.here(4).link.latency_s == pytest.approx(140e-6)


def test_the_overlap_of_few_hosts_tells_the_steps_of_more() -> None:
    here, buckets = replace(HERE, cluster=replace(CLUSTER, overlap=0.6)), [4 << 20] * 8
    steps = {}
    for hosts in (2, 3, 4):
        work = Work(0.05, 0.03, buckets)
        steps[hosts] = {"compute": 0.05, "step": predict_step(work, here.here(hosts), hosts).step_s}
    found, checks = fit_steps(Measurements("here", [], steps, buckets, 0.6, CORES), HERE)
    assert found.cluster.overlap == pytest.approx(0.6)
    assert [one.hosts for one in checks] == [3, 4] and all(abs(one.error) < 1e-6 for one in checks)


def test_efficiency_falls_with_hosts_and_rises_with_the_wire() -> None:
    for drawn in DRAWN:
        by_wire = [[one.efficiency for one in predict_drawn(drawn, CLUSTER, rate, HOSTS)] for rate in GIGABITS]
        assert all(one[0] == 1.0 and one == sorted(one, reverse=True) for one in by_wire)
        for slower, faster in pairwise(by_wire):
            assert all(one <= other + 1e-12 for one, other in zip(slower, faster, strict=True))
        ring = predict_drawn(horovod(drawn), replace(CLUSTER, algorithm="ring"), 100, [4096])[0]
        assert ring.efficiency < predict_drawn(drawn, CLUSTER, 100, [4096])[0].efficiency


def test_the_page_stands_alone_and_names_its_sources() -> None:
    page = draw_page(DRAWN, CLUSTER, "fitted", "here")
    assert page.count("<svg") == 2 * len(DRAWN)
    assert all(one.source.split(",")[0].split()[0] in page for one in REFERENCES)
    assert "<script" not in page and "src=" not in page and "<link" not in page
