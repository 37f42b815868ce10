"""Horovod's hostfile, node1 slots=4 on every line, and what it takes after -H: node1:4,node2:4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hvdkit.errors import LaunchError
from hvdkit.launch.hosts.dialect import Dialect
from hvdkit.launch.hosts.host import Host, merge_hosts, settle_slots
from hvdkit.launch.hosts.names import parse_hosts, parse_list, parse_slots, split_slots
from hvdkit.launch.hosts.openmpi import parse_keyed
from hvdkit.launch.hosts.ranges import split_list
from hvdkit.launch.hosts.reading import Reading, content_lines, read_lines


def parse(text: str) -> Reading:
    """Read a hostfile of Horovod, or a file with what would stand after -H."""
    return read_lines(content_lines(text), _parse_line)


def write(hosts: Sequence[Host]) -> str:
    """Write a hostfile of Horovod."""
    return "".join(f"{host.name} slots={host.slots}\n" for host in hosts)


def parse_host_list(text: str, unsaid: int | None = 1) -> tuple[Host, ...]:
    """Parse `-H`: host:slots,host,user@host:slots,[IPv6]:slots,nid[001-004]:slots; repeated hosts add up.

    unsaid: slots of a bare host.
    Raises LaunchError naming every part that cannot be used.
    """
    parts = enumerate(part.strip() for part in split_list(text))
    reading = read_lines(parts, parse_part, merge=lambda hosts: merge_hosts(settle_slots(hosts, unsaid)))
    if reading.problems:
        problems = "; ".join(problem for _, problem in reading.problems)
        raise LaunchError(f"-H {text!r}: {problems}. Write it like -H node1:4,node2:4.")
    return reading.hosts


def parse_part(part: str) -> list[Host]:
    """Read host or host:slots. Raises ValueError for what is neither."""
    if not part:
        raise ValueError("there is a host missing at a comma")
    name, slots = split_slots(part)
    hosts = parse_hosts(name)
    return hosts if slots is None else [replace(host, slots=parse_slots("slots", slots)) for host in hosts]


def _parse_line(content: str) -> list[Host]:
    if "=" in content or " " in content or "\t" in content:
        hosts = parse_keyed(content, {"slots": "slots"})
    else:
        hosts = parse_list(content, parse_part)
    if any(host.slots is None for host in hosts):
        raise ValueError(f"{content!r} has no slots, and Horovod has no default. Write: {hosts[0].name} slots=4")
    return hosts


HOROVOD = Dialect(
    name="horovod",
    title="Horovod",
    parse=parse,
    write=write,
    unsaid=1,
    rule="every host has slots",
    could_be=lambda text: "=" not in text,  # its files are also Open MPI's
)
