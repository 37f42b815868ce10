"""elastic.run where another system starts the ranks, and gives each its place in every world."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hvdkit.elastic import regrouping
from hvdkit.elastic.regrouping import ExternalRendezvous
from hvdkit.elastic.state import HostUpdateResult, State
from hvdkit.engine import runtime, startup
from hvdkit.errors import HorovodInternalError, HostsUpdatedInterrupt, RankLostError, RanksDisagreeError
from hvdkit.transport.polling import check_wait


class Driver:
    """Gives places at once, and notes what happens."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.fails = 0
        self.announced_s = 0.0

    def watch(self, notify: Callable[[float, int], None] | None) -> None:
        if notify is not None and self.announced_s:
            notify(self.announced_s, HostUpdateResult.added)

    def synchronized(self) -> None:
        self.said.append("synchronized")

    def committed(self) -> None:
        self.said.append("committed")

    def check(self) -> None:
        self.said.append("checked")

    def wait(self, why: str) -> None:
        self.said.append(f"wait: {why}")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """The engine leaves its world and enters another one; the first `fails` times it does not find the others."""
    found = Driver()

    def restart(change: Callable[[], Any], *, idle: bool) -> None:
        found.said.append("leaves together" if idle else "leaves alone")
        change()
        if found.fails:
            found.fails -= 1
            raise RankLostError(f"attempt {found.fails}")

    monkeypatch.setattr(runtime, "restart", restart)
    yield found


def test_a_rank_waits_for_a_place_until_a_world_begins(driver: Driver) -> None:
    driver.fails = 2
    ExternalRendezvous(driver).restart(lost=RankLostError("of rank 1"))
    assert driver.said == [
        *("leaves alone", "wait: of rank 1"),
        *("leaves alone", "wait: attempt 1"),
        *("leaves alone", "wait: attempt 0"),
    ]


def test_a_world_that_grows_is_left_together(driver: Driver) -> None:
    ExternalRendezvous(driver).restart(lost=None)
    assert driver.said == ["leaves together", "wait: there are new workers"]


class Nothing(State):
    def save(self) -> None: ...

    def restore(self) -> None: ...

    def sync(self) -> None: ...


def test_workers_that_come_while_a_rank_enters_a_world_are_taken_in_at_its_next_commit(driver: Driver) -> None:
    state, changes = Nothing(lambda value: value), ExternalRendezvous(driver)
    state.world_may_change = True
    changes.begin(state)
    changes.agree()
    state.commit()
    driver.announced_s = 5.0
    state.on_hosts_updated(driver.announced_s, HostUpdateResult.added)
    state.on_reset()
    changes.agree()
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()
    state.on_reset()
    changes.agree()
    state.commit()  # they are announced still, and in the world
    changes.end(state, well=True)
    state.commit()
    assert driver.said == ["committed"] * 3, "the driver knows that ranks of this world got as far as a commit"


def test_ranks_that_disagree_would_do_so_in_the_next_world_too(driver: Driver) -> None:
    lost = RanksDisagreeError("one adds, one broadcasts")
    with pytest.raises(HorovodInternalError, match="one adds"):
        ExternalRendezvous(driver).restart(lost=lost)
    assert driver.said == []


def test_places_are_of_the_process(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regrouping, "_places", None)
    monkeypatch.setattr(startup, "_next_world", None)
    assert regrouping.find_places() is None
    regrouping.set_places(driver)
    assert regrouping.find_places() is driver


def test_a_rank_whose_world_ends_while_it_connects_waits_in_init_for_the_next_one(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regrouping, "_places", None)
    monkeypatch.setattr(startup, "_next_world", None)
    regrouping.set_places(driver)
    ends: list[HorovodInternalError] = [RankLostError("of rank 1"), RankLostError("of rank 2")]

    def join() -> str:
        check_wait()
        if ends:
            raise ends.pop(0)
        return "in"

    assert startup.enter_world(join, lambda: driver.said.append("leaves")) == "in"
    check_wait()  # it connects no more
    assert driver.said == [
        *("checked", "leaves", "wait: of rank 1"),
        *("checked", "leaves", "wait: of rank 2"),
        "checked",
    ]
    ends = [RanksDisagreeError("one adds, one broadcasts")]
    with pytest.raises(RanksDisagreeError):
        startup.enter_world(join, lambda: None)
