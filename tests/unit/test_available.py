"""Which hosts a job may be started on: not those that were lost, nor those that do not answer."""

from __future__ import annotations

import asyncio
import threading

import pytest

from hvdkit.errors import LaunchError
from hvdkit.launch.detect import hosts as host_lookup
from hvdkit.launch.elastic.host_pool import Blacklist, HostPool
from hvdkit.launch.hostfiles import Host

HOSTS = (Host("far1", 1), Host("far2", 2), Host("far3", 3))


def names(hosts: tuple[Host, ...]) -> list[str]:
    return [host.name for host in hosts]


def test_only_hosts_that_answer_are_found_and_each_is_asked_once() -> None:
    asked, said = [], list[str]()

    async def answers(host: Host) -> bool:
        asked.append(host.name)
        return host.name != "far3"

    async def run() -> None:
        pool = HostPool(HOSTS, said.append, answers=answers)
        assert not pool.may_change
        for _ in range(2):
            assert names(await pool.find({"far1"})) == ["far1", "far2"]
        assert asked == ["far2", "far3"]
        assert len(said) == 1 and "far3 does not answer" in said[0]
        assert pool.may_change  # it is asked again later
        pool.probe_again()
        assert names(await pool.find()) == ["far1", "far2"]
        assert asked[2:] == ["far1", "far2"]

    asyncio.run(run())


def test_a_host_that_was_lost_comes_back_after_its_time_and_has_to_answer() -> None:
    asked, said, now = [], list[str](), 100.0

    async def answers(host: Host) -> bool:
        asked.append(host.name)
        return True

    async def run() -> None:
        nonlocal now
        pool = HostPool(HOSTS, said.append, answers=answers, lost=Blacklist((20, 30)), clock=lambda: now)
        assert len(await pool.find()) == 3
        pool.exclude({"far2", "unknown"})
        assert names(await pool.find()) == ["far1", "far3"] and pool.may_change
        now += 30
        assert len(await pool.find()) == 3
        assert asked == ["far1", "far2", "far3", "far2"]

    asyncio.run(run())
    assert said == ["far2 is excluded for 30 s."]


def test_this_machine_is_never_lost() -> None:
    async def run() -> None:
        pool = HostPool((Host("localhost", 2),), print)
        pool.exclude({"localhost"})
        assert names(await pool.find()) == ["localhost"]

    asyncio.run(run())


def test_a_script_that_fails_is_told_once_and_changes_nothing() -> None:
    said = list[str]()
    found: list[tuple[Host, ...]] = [(Host("localhost", 1),), (Host("localhost", 2), Host("no.such.host.invalid", 1))]

    async def look() -> tuple[Host, ...]:
        if not found:
            raise LaunchError("it has failed.")
        return found.pop(0)

    async def run() -> None:
        pool = HostPool((), said.append, discover=look)
        assert [host.slots for host in await pool.find()] == [1]
        for _ in range(3):
            assert [(host.name, host.slots) for host in await pool.find()] == [("localhost", 2)]

    asyncio.run(run())
    assert said == ["it has failed. hvdrun continues with the hosts that it knows."]


def test_the_loop_goes_on_while_names_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    is_turn_taken = threading.Event()

    async def look() -> tuple[Host, ...]:
        return (Host("localhost", 1),)

    async def run() -> None:
        asyncio.get_running_loop().call_later(0.01, is_turn_taken.set)
        assert names(await HostPool((), print, discover=look).find()) == ["localhost"]

    monkeypatch.setattr(host_lookup, "is_known", lambda host: is_turn_taken.wait(20))
    asyncio.run(run())
