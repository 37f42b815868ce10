"""Whom hvdrun ends, so that others can go on: what is known of the ranks is made up here."""

from __future__ import annotations

import signal
import time

from hvdkit.launch.patience import find_hanging
from hvdkit.launch.ranks import Ranks


def three() -> Ranks:
    ranks = Ranks(3)
    for rank in range(3):
        ranks.hear(rank, ["ready"])
    return ranks


def test_one_that_is_stopped_is_waited_for_so_long() -> None:
    ranks = three()
    ranks.pause(1, int(signal.SIGSTOP))
    now = time.monotonic()
    assert not find_hanging(ranks, now + 4, 5) and not find_hanging(ranks, now + 9, 0)
    assert find_hanging(ranks, now + 6, 5) == {1: "it has been stopped by SIGSTOP for 5 s"}
    ranks.pause(1, 0)
    assert not find_hanging(ranks, now + 6, 5)


def test_one_that_does_not_come_to_the_others_is_ended_and_all_are_who_do_not_come_together() -> None:
    ranks = three()
    ranks.outlive(2)
    ranks.hear(0, ["changes"])
    now = time.monotonic()
    assert not find_hanging(ranks, now + 4, 5)
    assert list(find_hanging(ranks, now + 6, 5)) == [1]
    ranks.hear(1, ["changes"])
    assert sorted(find_hanging(ranks, now + 6, 5)) == [0, 1]
    ranks.hear(0, ["ready"])
    ranks.hear(1, ["ready"])
    assert not find_hanging(ranks, now + 6, 5)
