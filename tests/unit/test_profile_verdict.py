"""The verdict on made-up jobs, of which it is known where their time goes."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_steps import MS, Job

from hvdkit.errors import ProfileError
from hvdkit.profiling.network import parse_network
from hvdkit.profiling.recordings import read_recordings, write_recordings
from hvdkit.profiling.slow import find_change
from hvdkit.profiling.steps import find_steps
from hvdkit.profiling.text import describe, describe_slow
from hvdkit.profiling.time_shares import split_steps
from hvdkit.profiling.verdict import Verdict, analyse
from hvdkit.tools.profile.report import build_report, build_trace, list_spans

FOUR_HOSTS = ("n1", "n1", "n2", "n2")


def verdict(job: Job) -> Verdict:
    return analyse(job.record()).verdict


def names(job: Job) -> list[str]:
    return [one.name for one in verdict(job).advice]


def test_a_step_is_what_it_was_made_of() -> None:
    parts = verdict(Job(loading=lambda *_: 3 * MS)).parts
    assert parts.compute_s == pytest.approx(10 * MS)
    assert parts.loading_s == pytest.approx(3 * MS)
    assert parts.late_s == pytest.approx(0, abs=1e-9)
    assert parts.exposed_s == pytest.approx(1 * MS)  # of the last bucket; the others hide
    assert parts.step_s == pytest.approx(14 * MS)


def test_a_slow_rank_is_named_with_by_how_much_and_since_when() -> None:
    job = Job(late=lambda rank, step: 6 * MS if rank == 2 and step >= 50 else 0.0)
    found = verdict(job)
    assert found.slow is not None
    assert (found.slow.ranks, found.slow.since) == ((2,), 50)
    assert found.slow.waited_s == pytest.approx(6 * MS)
    assert found.slow.times == pytest.approx(1.6)
    assert found.ranks[2].parts.late_s == pytest.approx(0, abs=1e-9)
    assert found.advice[0].name == "slow-rank" and found.advice[0].saves_s == pytest.approx(6 * MS * 70 / 115, rel=0.02)
    assert describe_slow(found).startswith(
        "Rank 2 on n1 is slow since step 50: the other ranks wait 6 ms for it in each step of"
    )
    assert describe_slow(found) in describe(found)


def test_a_rank_that_waits_for_its_data_is_told_from_one_that_computes() -> None:
    slow = verdict(Job(loading=lambda rank, _: 8 * MS if rank == 1 else 0.0))
    assert slow.slow is not None and slow.slow.loading_s == pytest.approx(8 * MS)
    assert slow.slow.since is None
    assert [one.name for one in slow.advice] == ["slow-rank"] and "The reason is data: rank 1" in slow.advice[0].text


def test_while_the_last_rank_waits_itself_it_is_the_network_that_is_waited_for() -> None:
    """Of rank 0's wait from 10 to 30 rank 1 works from 10 to 12, and from 20, when a bucket is back, to 24."""
    steps = find_steps(Job(ranks=2, buckets=2, steps=2).record())
    times = {"waiting": [[10, 20], [12, 25]], "reduced": [[20, 30], [20, 30]], "ready": [[5, 9], [6, 24]]}
    times |= {"filling": times["ready"], "handed": times["ready"], "taken": times["reduced"]}
    given: dict[str, Any] = {word: np.array(values, float)[:, None] for word, values in times.items()}
    shares = split_steps(replace(steps, began=np.zeros((2, 1)), ended=np.full((2, 1), 30.0), **given))
    assert shares.late[:, 0].tolist() == [6, 0] and shares.waited_for[:, 0].tolist() == [0, 6]
    assert shares.exposed[:, 0].tolist() == [14, 13]


def test_a_slow_host_is_named_if_none_of_its_ranks_is_it() -> None:
    def late(rank: int, step: int) -> float:
        return 5 * MS if rank == 2 + step % 2 else 0.0

    found = verdict(Job(late=late, hosts=FOUR_HOSTS))
    assert found.slow is not None and found.slow.ranks == (2, 3) and found.slow.host == "n2"
    assert "Every rank on n2 is slow in all steps" in describe(found)


def test_ranks_that_take_turns_are_not_called_slow() -> None:
    noise = np.random.default_rng(1).exponential(1.5 * MS, (4, 120))
    found = verdict(Job(late=lambda rank, step: float(noise[rank, step])))
    assert found.slow is None and found.parts.late_s > 0.5 * MS
    assert [one.name for one in found.advice] == ["uneven-work"]
    assert "different ranks are slow in different steps" in describe(found)


@pytest.mark.parametrize(
    ("loaders", "said"),
    [(0, "num_workers=1) to load during compute, with more"), (4, "4 processes per rank"), (-1, "prefetch")],
)
def test_slow_data_has_its_cure(loaders: int, said: str) -> None:
    found = verdict(Job(loading=lambda *_: 8 * MS, loaders=loaders))
    assert [one.name for one in found.advice] == ["data-loading"]
    assert found.advice[0].saves_s == pytest.approx(8 * MS) and said in found.advice[0].text


def test_advice_needs_no_core_that_a_rank_does_not_have() -> None:
    """Of one core no thread and no process can be taken away."""
    one, two = (
        describe(verdict(Job(cores=cores, threaded=False, bucket_s=3 * MS, loading=lambda *_: 8 * MS)))
        for cores in (1.0, 2.0)
    )
    assert "[no-spare-core" in one and "OMP_NUM_THREADS" not in one and "1 cores" not in one
    assert "Each rank has 1 core: start fewer ranks per host" in one
    assert "With 1 core per rank, DataLoader(..., num_workers=1) helps only if loading waits for files" in one
    assert "Set OMP_NUM_THREADS to 1 at most" in two and "Use DataLoader(..., num_workers=1) to load" in two


def test_a_job_that_computes_is_left_alone() -> None:
    found = verdict(Job(bucket_s=0.01 * MS))
    assert found.advice == () and "Nothing to change" in describe(found)


def test_a_slow_network_wants_fewer_bytes() -> None:
    """16 MiB take 40 ms beside 10 ms of compute; half of them take 20."""
    job = Job(hosts=FOUR_HOSTS, bucket_s=10 * MS)
    found = analyse(job.record())
    first = found.verdict.advice[0]
    assert first.name == "compression" and first.saves_s == pytest.approx(20 * MS, rel=0.1)
    assert found.verdict.network.known == "estimated"
    assert found.verdict.network.link.byte_s == pytest.approx(10 * MS / (4 << 20), rel=0.05)
    assert found.verdict.predicted[0].step_s == pytest.approx(found.verdict.parts.step_s)


def test_small_buckets_on_a_network_of_long_ways_want_to_be_larger() -> None:
    job = Job(hosts=FOUR_HOSTS, buckets=40, nbytes=64 << 10, bucket_s=0.5 * MS)
    found = analyse(job.record(), parse_network("10gbit,500us")).verdict
    assert "small-buckets" in [one.name for one in found.advice]
    assert "HVDKIT_FUSION_BYTES" in describe(found)


def test_more_hosts_cost_more_and_a_better_network_less() -> None:
    recordings = Job(threaded=False).record()
    slow, fast = (analyse(recordings, parse_network(rate)).verdict.predicted for rate in ("1gbit", "100gbit,5us"))
    assert [one.hosts for one in slow] == [1, 2, 4, 8]
    assert slow[0].step_s == fast[0].step_s == pytest.approx(11 * MS)
    assert [one.efficiency for one in slow] == sorted((one.efficiency for one in slow), reverse=True)
    assert all(one.step_s < other.step_s for one, other in zip(fast[1:], slow[1:], strict=True))
    assert analyse(recordings).verdict.network.known == "assumed"


@pytest.mark.parametrize("text", ["fast", "10", "0gbit", "10gbit,5", "10gbit 5us"])
def test_a_network_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ProfileError, match="Examples: 10gbit"):
        parse_network(text)


def test_clocks_of_hosts_need_not_agree() -> None:
    job = Job(hosts=FOUR_HOSTS, late=lambda rank, step: 6 * MS if rank == 3 and step >= 50 else 0.0)
    right, off = verdict(job), verdict(replace(job, off_s={"n2": 1234.5}, drift=1e-7))
    assert right.slow is not None and off.slow is not None
    assert off.slow.ranks == right.slow.ranks == (3,) and off.slow.since == right.slow.since == 50
    assert off.slow.waited_s == pytest.approx(right.slow.waited_s, rel=0.05)
    assert off.parts.exposed_s == pytest.approx(right.parts.exposed_s, abs=0.05 * MS)


def test_pauses_are_left_out_and_told() -> None:
    found = verdict(Job(late=lambda _, step: 500 * MS if step == 60 else 0.0))
    assert found.pauses == 1 and found.pauses_s == pytest.approx(500 * MS)
    assert found.parts.step_s == pytest.approx(11 * MS)
    assert found.slow is None and "1 step that took 500 ms longer than usual" in describe(found)


def test_ranks_that_kept_different_steps_are_compared_in_those_of_all() -> None:
    found = verdict(Job(first=(0, 30, 0, 10)))
    assert (found.first, found.last) == (
        36,
        119,
    )  # where the first of a rank began is not known; five are for warming up


def test_a_rank_that_sent_nothing_is_named() -> None:
    found = analyse(Job().record()[:3]).verdict
    assert found.missing == (3,) and "No recording came from rank 3" in describe(found)


def test_nothing_to_judge_is_said() -> None:
    for recordings, why in (([], "No rank"), ([replace(Job().record()[0], plans=[])], "reduced no gradients")):
        with pytest.raises(ProfileError, match=why):
            analyse(recordings)
    with pytest.raises(ProfileError, match="fewer than two steps"):
        analyse(Job(steps=1).record())


def test_a_second_optimizer_in_the_same_step_counts_as_communication() -> None:
    recordings = Job().record()
    for one in recordings:
        facts, rows = one.plans[0]
        other = rows[::2].copy()  # seldomer, so that the first remains the one that is looked at
        other[:, 1:3] -= 8 * MS
        other[:, 4] -= 8 * MS
        other[:, 6:] -= 8 * MS
        other[:, 3] = 0.0
        one.plans.append((replace(facts, name="optimizer.2"), other))
    found = analyse(recordings).verdict
    assert found.parts.exposed_s == pytest.approx(1.5 * MS, rel=0.02)
    assert found.parts.compute_s == pytest.approx(9.5 * MS, rel=0.02)


def test_a_change_is_found_where_it_is_and_nowhere_else() -> None:
    assert find_change([0.0] * 30 + [1.0] * 30) == 30
    assert find_change([1.0] * 60) == find_change([0.0] * 60) == 0
    assert find_change([0.0] * 30 + [100.0] + [0.0] * 29) == 0
    assert find_change([0.0, 1.0]) == 0


def test_recordings_are_read_as_they_were_written(tmp_path: Path) -> None:
    recordings = Job(ranks=2, steps=5).record()
    write_recordings(recordings, tmp_path / "run.npz")
    again = read_recordings(tmp_path / "run.npz")
    assert [one.facts for one in again] == [one.facts for one in recordings]
    assert again[1].plans[0][0] == recordings[1].plans[0][0]
    np.testing.assert_array_equal(again[1].plans[0][1], recordings[1].plans[0][1])
    (tmp_path / "other").write_text("no")
    with pytest.raises(ProfileError, match="is not a recording"):
        read_recordings(tmp_path / "other")


def test_what_training_did_is_drawn_without_gaps() -> None:
    late = Job(late=lambda rank, step: 6 * MS if rank == 2 else 0.0, loading=lambda *_: 2 * MS)
    found = analyse(late.record())
    for rank in range(4):
        spans = [one for one in list_spans(found.steps, [10, 11]) if one.rank == rank and one.bucket is None]
        assert all(one.ended == pytest.approx(after.began) for one, after in itertools.pairwise(spans))
        for kind, seconds in (("loading", 2 * MS), ("late", 0.0 if rank == 2 else 6 * MS)):
            drawn = sum(one.ended - one.began for one in spans if one.kind == kind)
            assert drawn == pytest.approx(2 * seconds, abs=1e-9)


def test_the_trace_has_every_rank_on_one_clock() -> None:
    job = Job(hosts=FOUR_HOSTS, off_s={"n2": 77.0})
    trace = json.loads(json.dumps(build_trace(analyse(job.record()))))
    events = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    assert {one["pid"] for one in events} == {0, 1, 2, 3}
    assert {one["name"] for one in events} >= {"compute", "communication", "bucket 3"}
    assert max(one["ts"] + one["dur"] for one in events) < 1e6 * 120 * 12 * MS
    assert min(one["ts"] for one in events) == 0


def test_the_report_asks_for_nothing_and_shows_all() -> None:
    job = Job(hosts=FOUR_HOSTS, late=lambda rank, step: 6 * MS if rank == 3 and step >= 50 else 0.0)
    page = build_report(analyse(job.record()))
    assert not re.search(r"""(src|href)="(?!#)|@import|url\((?!#)|<script""", page)
    assert page.count("<svg") == page.count("</svg>") == 6
    assert "Rank 3 on n2 is slow since step 50" in page and "waited for rank 3" in page
    assert "layer3" in page and "waiting for slower ranks" in page and "predicted" in page
