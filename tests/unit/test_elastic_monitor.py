"""Which ranks hvdrun kills so that others can continue: states of ranks, and a clock, that are made up here."""

from __future__ import annotations

import signal

from hvdkit.launch.elastic.monitor import find_hanging
from hvdkit.launch.state.ranks import End, Ranks, describe_loss


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def three() -> tuple[Clock, Ranks]:
    clock = Clock()
    ranks = Ranks(3, clock)
    for rank in range(3):
        ranks.register(rank, "a")
        ranks.hear(rank, ["ready"])
    return clock, ranks


def test_one_that_is_stopped_is_waited_for_so_long() -> None:
    clock, ranks = three()
    ranks.pause(1, int(signal.SIGSTOP))
    clock.now += 4
    assert not find_hanging(ranks, 5)
    clock.now += 2
    assert not find_hanging(ranks, 0)
    assert find_hanging(ranks, 5) == {1: "it has been stopped by SIGSTOP for 5 s"}
    ranks.pause(1, 0)
    assert not find_hanging(ranks, 5)


def test_one_that_was_stopped_and_has_ended_does_not_hang() -> None:
    clock, ranks = three()
    ranks.pause(1, int(signal.SIGSTOP))
    ranks.end(1, End(137, signal.SIGKILL))
    clock.now += 6
    assert not find_hanging(ranks, 5)


def test_one_that_does_not_come_to_the_others_is_ended_and_all_are_who_do_not_come_together() -> None:
    clock, ranks = three()
    ranks.continue_without(2)
    ranks.hear(0, ["changing"])
    clock.now += 4
    assert not find_hanging(ranks, 5)
    clock.now += 2
    assert list(find_hanging(ranks, 5)) == [1]
    ranks.hear(1, ["changing"])
    clock.now += 6
    assert sorted(find_hanging(ranks, 5)) == [0, 1]
    ranks.hear(0, ["ready"])
    ranks.hear(1, ["ready"])
    assert not find_hanging(ranks, 5)


def test_those_that_wait_are_not_killed_while_a_failure_is_to_be_handled() -> None:
    clock, ranks = three()
    for rank in range(2):
        ranks.hear(rank, ["changing"])
    ranks.end(2, End(137, signal.SIGKILL))
    clock.now += 6
    assert not find_hanging(ranks, 5)


def test_a_loss_gives_those_that_wait_their_time_anew() -> None:
    clock, ranks = three()
    ranks.hear(0, ["changing"])
    clock.now += 4
    ranks.continue_without(2)
    clock.now += 4
    assert not find_hanging(ranks, 5)


def test_a_rank_that_hvdrun_killed_is_not_said_to_have_had_too_little_memory() -> None:
    _, ranks = three()
    ranks.states[1].killed_by_hvdrun = True
    for rank in (1, 2):
        ranks.end(rank, End(137, signal.SIGKILL))
    assert describe_loss(ranks, 1) == "rank 1 on a was killed by hvdrun after --elastic-hang-timeout-s"
    assert "out of memory" in describe_loss(ranks, 2)
