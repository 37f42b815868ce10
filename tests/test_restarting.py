"""Whether a job that has ended is started again, on which hosts, and with how many ranks."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.launch.agent.wire import ENDED_BY_HVDRUN
from hvdkit.launch.blacklist import Blacklist
from hvdkit.launch.ranks import End, Ranks
from hvdkit.launch.restarting import MOST_IN_VAIN, Life, Terms, choose_ranks, find_lost_hosts, why_not_again
from hvdkit.launch.verdict import How, Verdict, judge

TERMS = Terms(least=2, most=4)
LOST_PEER = ("hvdkit.errors.RankLostError: rank 1 is gone",)


def life(how: How, code: int = 1, *, kept: bool = True, begun: bool = True, asked: bool = False) -> Life:
    return Life(Verdict(code, how=how), begun=begun, kept=kept, asked=asked)


def how(*ends: End | None, hosts: Sequence[str] = ("a",), status: int = 1, size: int = 0, interrupted: int = 0) -> How:
    ranks = Ranks(size or len(ends))
    for rank, end in enumerate(ends):
        ranks.hosts[rank] = hosts[rank % len(hosts)]
        ranks.lose(rank) if end is None else ranks.end(rank, end)
    return judge(ranks, status, interrupted=interrupted).how


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (how(End(137, signal.SIGKILL), End(0)), How.DIED),
        (how(End(137), End(0)), How.DIED),  # `bash -c` around a rank that was killed
        (how(End(1, tail=LOST_PEER), End(1, tail=LOST_PEER)), How.DIED),
        (how(None, End(0), hosts=("a", "b")), How.DIED),
        (how(None, None), How.DIED),
        (how(End(1, tail=("ZeroDivisionError",)), End(1, tail=LOST_PEER)), How.FAILED),
        (how(End(1, tail=("ZeroDivisionError",)), End(143, 15, told=ENDED_BY_HVDRUN)), How.FAILED),
        (how(End(0), End(0), status=0), How.WELL),
        (how(End(0), size=3), How.ABSENT),
        (how(End(75), End(75)), How.SAVED),
        (how(End(75, told=ENDED_BY_HVDRUN), End(75, told=ENDED_BY_HVDRUN), interrupted=15), How.SAVED),
        (how(End(75, told=ENDED_BY_HVDRUN), End(75, told=ENDED_BY_HVDRUN)), How.DIED),  # mpirun had ended
        (how(End(130, 2), interrupted=2), How.TOLD),
    ],
)
def test_deaths_are_told_from_errors(seen: How, expected: How) -> None:
    assert seen is expected


def test_a_death_is_followed_by_another_life_and_an_error_is_not() -> None:
    assert why_not_again([life(How.DIED)], TERMS) is None
    for end in (How.WELL, How.SAVED, How.TOLD, How.REFUSED, How.ABSENT, How.FAILED):
        assert why_not_again([life(end)], TERMS) == ""
        assert (why_not_again([life(How.DIED), life(end)], TERMS) is None) == (end is How.ABSENT)
    assert why_not_again([life(How.SAVED, 75, asked=True)], TERMS) is None
    assert why_not_again([life(How.ABSENT)], Terms(least=2, most=4, varies=True)) is None


def test_where_ranks_outlive_each_other_only_a_training_that_has_begun_and_saves_is_started_again() -> None:
    terms = Terms(least=2, most=4, outlives=True, saves=True)
    assert why_not_again([life(How.DIED)], terms) is None
    assert why_not_again([life(How.DIED, begun=False)], terms) == ""
    assert why_not_again([life(How.DIED)], Terms(least=2, most=4, outlives=True)) == ""


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.none() | st.integers(0, 8))
def test_lives_come_to_an_end(kept: list[bool], limit: int | None) -> None:
    lives = [life(How.DIED, kept=one) for one in kept]
    why = why_not_again(lives, Terms(least=1, most=1, limit=limit))
    in_vain = len(kept) >= MOST_IN_VAIN and not any(kept[-MOST_IN_VAIN:])
    assert (why is None) == (not in_vain and (limit is None or len(kept) - 1 < limit))
    assert why is None or "--reset-limit" in why or "before anything was saved" in why


@given(st.integers(1, 9), st.integers(1, 9), st.none() | st.integers(0, 20))
def test_ranks_fit_the_slots_or_there_are_none(least: int, more: int, room: int | None) -> None:
    terms = Terms(least=least, most=least + more)
    ranks = choose_ranks(room, terms)
    if room is not None and room < least:
        assert ranks == 0
    else:
        assert ranks == min(terms.most, terms.most if room is None else room)


def on_three_hosts() -> Ranks:
    ranks = Ranks(6)
    ranks.hosts.update({rank: f"inner{rank // 2}" for rank in range(6)})
    return ranks


PLANNED = (("n0", 2), ("n1", 2), ("n2", 2))


def test_a_host_is_lost_if_all_of_its_ranks_are_and_bears_its_planned_name() -> None:
    ranks = on_three_hosts()
    ranks.fall_silent(4)
    assert find_lost_hosts(ranks, How.DIED, PLANNED) == set()
    ranks.fall_silent(5)
    assert find_lost_hosts(ranks, How.DIED, PLANNED) == {"n2"}
    assert find_lost_hosts(ranks, How.DIED, ()) == {"inner2"}


def test_a_host_that_others_have_gone_on_without_is_lost_when_they_end_too() -> None:
    ranks = on_three_hosts()
    for rank in (2, 3):
        ranks.lose(rank)
        ranks.outlive(rank)
    for rank in (0, 1, 4, 5):
        ranks.lose(rank)
    assert find_lost_hosts(ranks, How.DIED, PLANNED) == {"n1"}


def test_a_rank_that_was_killed_leaves_its_host_usable() -> None:
    ranks = on_three_hosts()
    for rank in range(6):
        ranks.end(rank, End(137, signal.SIGKILL) if rank in (2, 3) else End(1, tail=LOST_PEER))
    assert find_lost_hosts(ranks, How.DIED, PLANNED) == set()


def test_a_host_from_which_nobody_came_is_left_out_if_others_came() -> None:
    ranks = Ranks(6)
    assert find_lost_hosts(ranks, How.ABSENT, PLANNED) == set()
    ranks.hosts.update({rank: f"inner{rank // 2}" for rank in range(3)})
    assert find_lost_hosts(ranks, How.ABSENT, PLANNED) == {"n2"}


@given(st.floats(1, 60), st.floats(0, 3000), st.integers(1, 60), st.floats(0, 1))
def test_a_host_comes_back_after_a_time_that_doubles_within_its_bounds(
    shortest: float, more: float, times: int, drawn: float
) -> None:
    blacklist = Blacklist((shortest, shortest + more), lambda: drawn)
    waits = []
    now = 0.0
    for _ in range(times):
        wait = blacklist.add("a", now)
        assert not blacklist.allows("a", now) and blacklist.is_waiting(now)
        now += wait
        assert blacklist.allows("a", now) and not blacklist.is_waiting(now)
        waits.append(wait)
    assert waits == sorted(waits) and all(shortest <= wait <= shortest + more for wait in waits)
    assert blacklist.allows("b", 0)


def test_without_a_cooldown_a_host_does_not_come_back() -> None:
    blacklist = Blacklist()
    blacklist.add("a", 0)
    assert not blacklist.allows("a", 1e9) and not blacklist.is_waiting(0)
