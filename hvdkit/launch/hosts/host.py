"""A host, and what repeated hosts add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Host:
    """A machine and how many ranks it may run.

    name: a host name or an address; an IPv6 address without its brackets.
    slots: None for as many as the host has cores. (While a file is being read: None if it does not say.)
    max_slots: never more ranks than this; None if the file does not say.
    user: whom to log in as; "" for the ssh default.
    """

    name: str
    slots: int | None = 1
    max_slots: int | None = None
    user: str = ""

    @property
    def login(self) -> str:
        """What ssh and mpirun are given: user@name, or the name alone."""
        return f"{self.user}@{self.name}" if self.user else self.name


@dataclass(frozen=True)
class FoundHosts:
    """Hosts, and where they come from.

    source: the file, -H or the scheduler's job, for messages.
    notes: what has to be said about how they were read, a sentence or more each.
    ranks: how many the scheduler was asked for; None for one on each slot.
    more: how to get more slots there; "" if there is nothing special to say.
    allocated: from a scheduler's allocation (or the launcher of an MPIJob), which nobody named on the command line.
    """

    hosts: tuple[Host, ...]
    source: str
    notes: tuple[str, ...] = ()
    ranks: int | None = None
    more: str = ""
    allocated: bool = False


def merge_hosts(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Add up the slots of hosts that are named more than once; a repeated host without slots counts one each time."""
    merged: dict[str, Host] = {}
    for host in hosts:
        before = merged.get(host.login)
        if before is not None:
            host = replace(
                before,
                slots=(before.slots or 1) + (host.slots or 1),
                max_slots=_add(before.max_slots, host.max_slots),
            )
        merged[host.login] = host
    return tuple(merged.values())


def settle_slots(hosts: Iterable[Host], slots: int | None) -> tuple[Host, ...]:
    """Give every host without slots this many; None leaves it at the number of its cores."""
    return tuple(host if host.slots is not None else replace(host, slots=slots) for host in hosts)


def format_hosts(hosts: Iterable[Host], most: int = 6) -> str:
    """Write hosts for a sentence: node1:4, node2:4, and so on up to `most`."""
    known = [f"{host.login}:{'cores' if host.slots is None else host.slots}" for host in hosts]
    return ", ".join(known[:most]) + (f" and {len(known) - most} more" if len(known) > most else "")


def _add(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b
