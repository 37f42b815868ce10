"""Whether a job that has ended is started again, on which hosts, and with how many ranks."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.launch.agent.wire import ENDED_BY_HVDRUN
from hvdkit.launch.elastic.host_pool import Blacklist
from hvdkit.launch.elastic.restart_policy import (
    MAX_ATTEMPTS_WITHOUT_PROGRESS,
    Attempt,
    RestartPolicy,
    choose_ranks,
    find_lost_hosts,
    give_up_reason,
)
from hvdkit.launch.state.outcome import JobResult, Outcome, conclude
from hvdkit.launch.state.ranks import End, Ranks

POLICY = RestartPolicy(min_ranks=2, max_ranks=4)
LOST_PEER = ("hvdkit.errors.RankLostError: rank 1 is gone",)


def life(how: Outcome, code: int = 1, *, kept: bool = True, begun: bool = True, asked: bool = False) -> Attempt:
    return Attempt(JobResult(code, outcome=how), joined=begun, checkpointed=kept, asked_to_save=asked)


def how(
    *ends: End | None, hosts: Sequence[str] = ("a",), status: int = 1, size: int = 0, interrupted: int = 0
) -> Outcome:
    ranks = Ranks(size or len(ends))
    for rank, end in enumerate(ends):
        ranks.register(rank, hosts[rank % len(hosts)])
        ranks.lose(rank) if end is None else ranks.end(rank, end)
    return conclude(ranks, status, interrupted=interrupted).outcome


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (how(End(137, signal.SIGKILL), End(0)), Outcome.RANK_DIED),
        (how(End(137), End(0)), Outcome.RANK_DIED),  # `bash -c` around a rank that was killed
        (how(End(1, tail=LOST_PEER), End(1, tail=LOST_PEER)), Outcome.RANK_DIED),
        (how(None, End(0), hosts=("a", "b")), Outcome.RANK_DIED),
        (how(None, None), Outcome.RANK_DIED),
        (how(End(1, tail=("ZeroDivisionError",)), End(1, tail=LOST_PEER)), Outcome.FAILED),
        (how(End(1, tail=("ZeroDivisionError",)), End(143, 15, ended_by=ENDED_BY_HVDRUN)), Outcome.FAILED),
        (how(End(0), End(0), status=0), Outcome.SUCCEEDED),
        (how(End(0), size=3), Outcome.MISSING_RANKS),
        (how(End(75), End(75)), Outcome.SAVED),
        (how(End(75, ended_by=ENDED_BY_HVDRUN), End(75, ended_by=ENDED_BY_HVDRUN), interrupted=15), Outcome.SAVED),
        (
            how(End(75, ended_by=ENDED_BY_HVDRUN), End(75, ended_by=ENDED_BY_HVDRUN)),
            Outcome.RANK_DIED,
        ),  # mpirun had ended
        (how(End(130, 2), interrupted=2), Outcome.INTERRUPTED),
    ],
)
def test_deaths_are_told_from_errors(seen: Outcome, expected: Outcome) -> None:
    assert seen is expected


def test_a_death_is_followed_by_another_life_and_an_error_is_not() -> None:
    assert give_up_reason([life(Outcome.RANK_DIED)], POLICY) is None
    for end in (
        Outcome.SUCCEEDED,
        Outcome.SAVED,
        Outcome.INTERRUPTED,
        Outcome.REFUSED,
        Outcome.MISSING_RANKS,
        Outcome.FAILED,
    ):
        assert give_up_reason([life(end)], POLICY) == ""
        assert (give_up_reason([life(Outcome.RANK_DIED), life(end)], POLICY) is None) == (end is Outcome.MISSING_RANKS)
    assert give_up_reason([life(Outcome.SAVED, 75, asked=True)], POLICY) is None
    assert (
        give_up_reason([life(Outcome.MISSING_RANKS)], RestartPolicy(min_ranks=2, max_ranks=4, discovers=True)) is None
    )


def test_where_ranks_outlive_each_other_only_a_training_that_has_begun_and_saves_is_started_again() -> None:
    policy = RestartPolicy(min_ranks=2, max_ranks=4, ranks_survive=True, checkpoints="folder")
    assert give_up_reason([life(Outcome.RANK_DIED)], policy) is None
    assert give_up_reason([life(Outcome.RANK_DIED, begun=False)], policy) == ""
    assert give_up_reason([life(Outcome.RANK_DIED)], RestartPolicy(min_ranks=2, max_ranks=4, ranks_survive=True)) == ""


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.none() | st.integers(0, 8))
def test_lives_come_to_an_end(kept: list[bool], limit: int | None) -> None:
    lives = [life(Outcome.RANK_DIED, kept=one) for one in kept]
    why = give_up_reason(lives, RestartPolicy(min_ranks=1, max_ranks=1, max_restarts=limit))
    in_vain = len(kept) >= MAX_ATTEMPTS_WITHOUT_PROGRESS and not any(kept[-MAX_ATTEMPTS_WITHOUT_PROGRESS:])
    assert (why is None) == (not in_vain and (limit is None or len(kept) - 1 < limit))
    assert why is None or "--reset-limit" in why or "before a checkpoint was saved" in why


@given(st.integers(1, 9), st.integers(1, 9), st.none() | st.integers(0, 20))
def test_ranks_fit_the_slots_or_there_are_none(least: int, more: int, room: int | None) -> None:
    policy = RestartPolicy(min_ranks=least, max_ranks=least + more)
    ranks = choose_ranks(room, policy)
    if room is not None and room < least:
        assert ranks == 0
    else:
        assert ranks == min(policy.max_ranks, policy.max_ranks if room is None else room)


def on_three_hosts() -> Ranks:
    ranks = Ranks(6)
    for rank in range(6):
        ranks.register(rank, f"inner{rank // 2}")
    return ranks


PLANNED = (("n0", 2), ("n1", 2), ("n2", 2))


def test_a_host_is_lost_if_all_of_its_ranks_are_and_bears_its_planned_name() -> None:
    ranks = on_three_hosts()
    ranks.mark_unreachable(4)
    assert find_lost_hosts(ranks, Outcome.RANK_DIED, PLANNED) == set()
    ranks.mark_unreachable(5)
    assert find_lost_hosts(ranks, Outcome.RANK_DIED, PLANNED) == {"n2"}
    assert find_lost_hosts(ranks, Outcome.RANK_DIED, ()) == {"inner2"}


def test_a_host_that_others_have_gone_on_without_is_lost_when_they_end_too() -> None:
    ranks = on_three_hosts()
    for rank in (2, 3):
        ranks.lose(rank)
        ranks.continue_without(rank)
    for rank in (0, 1, 4, 5):
        ranks.lose(rank)
    assert find_lost_hosts(ranks, Outcome.RANK_DIED, PLANNED) == {"n1"}


def test_a_rank_that_was_killed_leaves_its_host_usable() -> None:
    ranks = on_three_hosts()
    for rank in range(6):
        ranks.end(rank, End(137, signal.SIGKILL) if rank in (2, 3) else End(1, tail=LOST_PEER))
    assert find_lost_hosts(ranks, Outcome.RANK_DIED, PLANNED) == set()


def test_a_host_from_which_nobody_came_is_left_out_if_others_came() -> None:
    ranks = Ranks(6)
    assert find_lost_hosts(ranks, Outcome.MISSING_RANKS, PLANNED) == set()
    for rank in range(3):
        ranks.register(rank, f"inner{rank // 2}")
    assert find_lost_hosts(ranks, Outcome.MISSING_RANKS, PLANNED) == {"n2"}


@given(st.floats(1, 60), st.floats(0, 3000), st.integers(1, 60), st.floats(0, 1))
def test_a_host_comes_back_after_a_time_that_doubles_within_its_bounds(
    shortest: float, more: float, times: int, drawn: float
) -> None:
    blacklist = Blacklist((shortest, shortest + more), lambda: drawn)
    waits = []
    now = 0.0
    for _ in range(times):
        wait = blacklist.add("a", now)
        assert not blacklist.allows("a", now)
        now += wait
        assert blacklist.allows("a", now)
        waits.append(wait)
    assert waits == sorted(waits) and all(shortest <= wait <= shortest + more for wait in waits)
    assert blacklist.allows("b", 0)


def test_without_a_cooldown_a_host_does_not_come_back() -> None:
    blacklist = Blacklist()
    blacklist.add("a", 0)
    assert not blacklist.allows("a", 1e9) and not blacklist.returns
