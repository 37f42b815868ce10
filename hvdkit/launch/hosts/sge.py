"""The PE_HOSTFILE of SGE (Grid Engine): node1 4 all.q@node1 UNDEFINED."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hvdkit.launch.hosts.dialect import Dialect
from hvdkit.launch.hosts.host import Host
from hvdkit.launch.hosts.names import parse_hosts, parse_slots
from hvdkit.launch.hosts.reading import Reading, content_lines, read_lines


def parse(text: str) -> Reading:
    """Read a PE_HOSTFILE; a host with several queues has several lines, which add up."""
    return read_lines(content_lines(text), _parse_line)


def write(hosts: Sequence[Host]) -> str:
    """Write a PE_HOSTFILE."""
    return "".join(f"{host.name} {host.slots} all.q@{host.name} UNDEFINED\n" for host in hosts)


def _parse_line(content: str) -> list[Host]:
    words = content.split()
    if not 2 <= len(words) <= 4:
        raise ValueError(f"{content!r} should be: host, slots, queue, processors, like: node1 4 all.q@node1 UNDEFINED")
    return [replace(host, slots=parse_slots("slots", words[1])) for host in parse_hosts(words[0])]


def _could_be(text: str) -> bool:
    """A third word is a queue on a host, queue@host; without it these would be LSF's pairs."""
    lines = [line.split() for _, line in content_lines(text)]
    return all("@" in words[2] for words in lines if len(words) > 2)


SGE = Dialect(
    name="sge",
    title="SGE",
    parse=parse,
    write=write,
    unsaid=1,
    rule="every host has slots",
    carries=frozenset({"slots", "ipv6"}),
    could_be=_could_be,
)
