"""Slots for a job: how many there are, and waiting for more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from hvdkit.launch import check
from hvdkit.launch.hosts import Host
from hvdkit.launch.job import count_room

_LOOK_S = 1.0

Hosts = tuple[Host, ...]


def count_slots(hosts: Hosts) -> int | None:
    """Count the slots of hosts; None if those of one are not known. One of this machine has as many as it has cores."""
    return count_room(hosts, {host.name: check.count_cores() for host in hosts if check.is_local(host)})


def describe_slots(hosts: Hosts, least: int) -> str:
    """Say how many slots there are, of how many."""
    room = count_slots(hosts) or 0
    return f"{room} slot{'s are' if room != 1 else ' is'} there, of {least} that are needed (--min-np)"


async def wait_for_room(
    look: Callable[[], Awaitable[Hosts]],
    choose: Callable[[Hosts], int],
    *,
    wait_s: float,
    may_grow: Callable[[], bool],
    tell: Callable[[Hosts], None],
) -> tuple[Hosts, int] | None:
    """Wait until there are hosts for a job; returns them and the ranks on them, None if there are too few for too long.

    choose: how many ranks hosts are given, 0 if that are too few. may_grow: could others come? tell: called once if it
    is to be waited for them.
    """
    import asyncio  # slow to load, and hvdrun --help gets here

    clock = asyncio.get_running_loop().time
    deadline, told = clock() + wait_s, False
    while True:
        hosts = await look()
        if ranks := choose(hosts):
            return hosts, ranks
        if clock() >= deadline or not may_grow():
            return None
        if not told:
            told = True
            tell(hosts)
        await asyncio.sleep(_LOOK_S)
