"""Speedup and efficiency against one rank, of made-up jobs of which they are known, and from a script."""

from __future__ import annotations

import re

import pytest
from made_up_steps import MS, Job
from profiled_script import train
from ranks import run_ranks
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.cli import main
from hvdkit.errors import ProfileError
from hvdkit.profiling.network import parse_network
from hvdkit.profiling.scaling_report import ScalingReport, describe_scaling
from hvdkit.profiling.verdict import analyse
from hvdkit.tools.profile.report import build_report


def report(job: Job, network: str = "", one_rank_s: float | None = None) -> ScalingReport:
    return analyse(job.record(), parse_network(network) if network else None, one_rank_s).verdict.scaling


FOUR_HOSTS = ("n1", "n2", "n3", "n4")


def test_the_job_itself_is_compared_with_what_its_ranks_compute_and_load() -> None:
    found = report(Job(loading=lambda *_: 3 * MS))  # a step of 14 ms, of which 1 ms is communication
    assert found.one_rank_s == pytest.approx(13 * MS) and not found.measured
    job = found.points[0]
    assert (job.ranks, job.hosts) == (4, 1)
    for one in (job.weak, job.strong):
        assert one.step_s == pytest.approx(14 * MS)
        assert one.speedup == pytest.approx(4 * 13 / 14) and one.efficiency == pytest.approx(13 / 14)


def test_a_measured_step_of_one_rank_takes_the_estimates_place() -> None:
    estimated, measured = report(Job()), report(Job(), one_rank_s=8 * MS)
    assert measured.measured and measured.one_rank_s == 8 * MS
    for mine, other in zip(measured.points, estimated.points, strict=True):
        assert mine.weak.speedup == pytest.approx(0.8 * other.weak.speedup)
        assert mine.strong.efficiency == pytest.approx(0.8 * other.strong.efficiency)
    assert "whose step takes 8 ms (measured), 4 ranks are 2.91 times as fast" in describe_scaling(measured)


@pytest.mark.parametrize("hosts", [(), FOUR_HOSTS])
def test_strong_scaling_shares_compute_and_keeps_communication(hosts: tuple[str, ...]) -> None:
    """On a network that costs nothing weak scaling is linear, and strong as far as Amdahl's law lets it."""
    free = report(Job(hosts=hosts), "100000gbit,0.001us")
    rest = free.points[0].weak.step_s - 10 * MS
    for times, point in zip((1, 2, 4, 8), free.points, strict=True):
        assert point.ranks == 4 * times
        if not hosts:  # on several hosts the job's own network counts in its rest
            assert point.weak.efficiency == pytest.approx(10 / 11, rel=1e-3)
            assert point.strong.step_s == pytest.approx(10 * MS / times + rest, rel=1e-3)
            assert point.strong.speedup == pytest.approx(4 * 10 * MS / point.strong.step_s)
    slow = report(Job(hosts=hosts), "1gbit,50us")
    for one in slow.points[1:]:
        assert one.strong.efficiency < one.weak.efficiency < slow.points[0].weak.efficiency


def test_words_say_where_more_ranks_stop_to_help() -> None:
    text = describe_scaling(report(Job(), "1gbit,1ms"))
    assert re.search(r"Weak scaling: from (\d+) ranks on, more than half", text), text
    assert "ranks would be hardly faster than" in text
    calm = describe_scaling(report(Job(), "100000gbit,0.001us"))
    assert "Weak scaling: from" not in calm and "hardly faster" not in calm
    assert len(re.findall(r" predicted$", calm, re.MULTILINE)) == 3


def test_the_page_draws_the_curves() -> None:
    pytest.importorskip("matplotlib")
    page = build_report(analyse(Job(steps=30).record()))
    assert page.index("On more hosts") < page.index("Against one rank</h2>") and page.count("<svg") == 6


def test_a_step_of_no_duration_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--one-rank-s", "0", "--read", "x"]) == 2
    assert "--one-rank-s 0 is no duration" in capsys.readouterr().err


def _reported() -> tuple[ScalingReport | None, str]:
    with joined():
        with pytest.raises(ProfileError, match="is no duration"), hvd.scaling_report(one_rank_s=-1):
            pass
        with hvd.scaling_report(network="25gbit", one_rank_s=0.002) as seen:
            train(30)
    return seen.report, seen.text


@pytest.mark.ranks
def test_steps_inside_of_a_script_are_reported_on_rank_0() -> None:
    (found, text), other = run_ranks(2, _reported)
    assert found is not None and other == (None, "")
    job = found.points[0]
    assert job.ranks == 2 and found.measured and job.weak.speedup == pytest.approx(2 * 0.002 / job.weak.step_s)
    assert text.startswith("Against one rank, whose step takes 2 ms (measured), 2 ranks are") and "25 Gbit/s" in text


def test_all_adapters_have_it() -> None:
    from pathlib import Path

    for name in ("torch", "tensorflow", "keras"):
        assert '"scaling_report",' in Path(hvd.__file__).parents[1].joinpath(name, "__init__.py").read_text()
