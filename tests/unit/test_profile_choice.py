"""The predicted times of strategies: what must hold of any job, and jobs of which the best one is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_steps import MS, Job

from hvdkit.profiling.choice import Measured, Strategies, balanced_s, compare_strategies
from hvdkit.profiling.network import parse_network
from hvdkit.profiling.text import describe
from hvdkit.profiling.verdict import analyse

FP16, BALANCED, LOCAL, DILOCO, ASYNCHRONOUS, BACKUP = (
    "fp16 compression",
    "balanced rows",
    "local SGD, every 8",
    "DiLoCo, every 100",
    "asynchronous, staleness 4",
    "backup steps, drop 1",
)


@st.composite
def measured(draw: st.DrawFn) -> Measured:
    """A step: compute, noise, and communication of which a part is hidden."""
    seconds = st.floats(1e-3, 1)
    own = draw(st.lists(seconds, min_size=1, max_size=6))
    noise, meeting, server = draw(seconds), draw(seconds), draw(seconds)
    exposed = draw(st.floats(0, 1)) * meeting
    step_s = max(own) + noise + exposed
    saved, remote = draw(st.floats(0, 1)) * exposed, draw(st.integers(0, len(own)))
    return Measured(own, step_s, noise, meeting, saved, server, remote)


def times(strategies: Strategies) -> dict[str, float]:
    return {one.name: one.step_s for one in strategies.choices}


@given(measured())
def test_what_holds_of_every_job(job: Measured) -> None:
    found = compare_strategies(job)
    each = times(found)
    least, most = balanced_s(job.own_s), max(job.own_s)
    assert min(job.own_s) * 0.999 <= least <= most * 1.001
    assert all(
        one.step_s >= least * 0.999 and one.speedup == pytest.approx(job.step_s / one.step_s) for one in found.choices
    )
    assert each["synchronous"] == job.step_s
    assert each[BALANCED] <= job.step_s * 1.001 and each[FP16] <= job.step_s * 1.001
    assert each[DILOCO] <= each[LOCAL] <= job.step_s + job.meeting_s
    assert each[ASYNCHRONOUS] <= max(most + job.server_s, job.remote * job.server_s / 2) * 1.001
    best, fastest = found.named(found.best), found.named(found.fastest)
    assert best.same and best.speedup <= fastest.speedup
    assert found.choices[0] in (best, fastest) or min(best.speedup, fastest.speedup) >= 1.05


@given(measured(), st.floats(1, 10))
def test_a_slower_network_makes_no_strategy_faster(job: Measured, times_slower: float) -> None:
    slower = replace(job, meeting_s=job.meeting_s * times_slower, server_s=job.server_s * times_slower)
    before, after = times(compare_strategies(job)), times(compare_strategies(slower))
    assert all(after[name] >= before[name] * 0.999 for name in before)


def test_equal_ranks_without_communication_stay_synchronous() -> None:
    found = compare_strategies(Measured([0.1] * 4, 0.1))
    assert found.best == found.fastest == "synchronous"
    each = times(found)
    assert each.pop(BACKUP) == pytest.approx(0.4 / 3)  # a step has the samples of three
    assert list(each.values()) == pytest.approx([0.1] * len(each))


def test_a_rank_at_a_third_of_the_speed_asks_for_balanced_rows() -> None:
    found = compare_strategies(Measured([0.1, 0.1, 0.3], 0.3))
    assert found.best == found.fastest == BALANCED
    assert found.named(BALANCED).speedup == found.named(ASYNCHRONOUS).speedup == pytest.approx(7 / 3)


def test_nobody_is_further_ahead_than_the_bound_on_staleness() -> None:
    found = compare_strategies(Measured([0.1, 0.1, 10.0], 10.0))
    assert found.named(ASYNCHRONOUS).speedup == pytest.approx((5 + 5 + 1) / 3)
    assert found.named(BACKUP).speedup == pytest.approx(17 * 2 / 3)


@pytest.mark.parametrize("own", [[], [0.1, 0.0]])
def test_times_that_are_none_are_refused(own: list[float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        compare_strategies(Measured(own, 0.1))


def test_a_profile_has_the_choice_and_says_it() -> None:
    uneven = analyse(Job(late=lambda rank, _: 20 * MS if rank == 2 else 0.0).record()).verdict
    assert uneven.strategies.best == BALANCED
    assert uneven.strategies.named(BALANCED).speedup == pytest.approx(31 / 13, rel=0.02)  # 4 / (3 / 10 + 1 / 30) = 12
    advice = next(one for one in uneven.advice if one.name == "balance-rows")
    assert advice.saves_s == pytest.approx(18 * MS, rel=0.02)
    assert "Use balanced rows (hvd.data.BalancedSampler, or in Keras hvd.BalancedDataset)" in describe(uneven)

    alike = analyse(Job().record()).verdict
    assert "balance-rows" not in [one.name for one in alike.advice]

    slow_link = analyse(Job(hosts=("n1", "n1", "n2", "n2")).record(), parse_network("1gbit")).verdict
    assert slow_link.strategies.best == FP16
    assert slow_link.strategies.fastest == DILOCO
    *_, other, last = describe(slow_link).splitlines()
    assert DILOCO in other and other.endswith("Compare its loss with that of synchronous training first.")
    assert last.startswith(f"Use {FP16} "), "the last line keeps the result"

    loading = analyse(Job(loading=lambda rank, _: 8 * MS if rank == 1 else 0.0).record()).verdict
    assert "balance-rows" not in [one.name for one in loading.advice]
