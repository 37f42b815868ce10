"""A host, and the sum of repeated hosts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Host:
    """A machine and how many ranks it may run.

    name: a host name or an address; an IPv6 address without its brackets.
    slots: None for the number of the host's cores. (While a file is being read: None if the file gives none.)
    max_slots: upper limit of ranks; None for no limit.
    user: login name; "" for ssh's default.
    """

    name: str
    slots: int | None = 1
    max_slots: int | None = None
    user: str = ""

    @property
    def login(self) -> str:
        """The argument of ssh and mpirun: user@name, or the name alone."""
        return f"{self.user}@{self.name}" if self.user else self.name


@dataclass(frozen=True)
class FoundHosts:
    """Hosts, and their source.

    source: the file, -H or the scheduler's job, for messages.
    notes: messages about how they were read, each of one or more sentences.
    ranks: number of tasks that the scheduler's job has; None for one on each slot.
    more: how to get more slots from this source; "" for no special advice.
    allocated: from a scheduler's allocation (or the launcher pod of an MPIJob), not from the command line.
    interface: name of the network interface that all hosts are to use; "" for hvdrun's choice.
    """

    hosts: tuple[Host, ...]
    source: str
    notes: tuple[str, ...] = ()
    ranks: int | None = None
    more: str = ""
    allocated: bool = False
    interface: str = ""


def merge_hosts(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Add up the slots of repeated hosts; a repeated host without slots counts one each time."""
    merged: dict[str, Host] = {}
    for host in hosts:
        first = merged.get(host.login)
        if first is not None:
            limits = (first.max_slots, host.max_slots)
            host = replace(
                first,
                slots=(first.slots or 1) + (host.slots or 1),
                max_slots=None if None in limits else sum(limit or 0 for limit in limits),
            )
        merged[host.login] = host
    return tuple(merged.values())


def settle_slots(hosts: Iterable[Host], slots: int | None) -> tuple[Host, ...]:
    """Set the slots of every host without slots; None leaves them at the number of its cores."""
    return tuple(host if host.slots is not None else replace(host, slots=slots) for host in hosts)


def format_hosts(hosts: Iterable[Host], most: int = 6) -> str:
    """Write hosts for a sentence: node1:4, node2:4, and so on up to `most`."""
    words = [f"{host.login}:{'cores' if host.slots is None else host.slots}" for host in hosts]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
