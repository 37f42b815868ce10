"""The nodefile of PBS and Torque: a host's name, once for each rank."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.launch.hosts.dialect import Dialect
from hvdkit.launch.hosts.host import Host
from hvdkit.launch.hosts.names import parse_hosts
from hvdkit.launch.hosts.reading import Reading, content_lines, count_repeats, read_lines


def parse(text: str) -> Reading:
    """Read a nodefile. Where no host is repeated no slots are said: no mpiprocs, or a site that names hosts once."""
    return read_lines(content_lines(text), _parse_line, merge=count_repeats)


def write(hosts: Sequence[Host]) -> str:
    """Write a nodefile."""
    return "".join(f"{host.name}\n" * (host.slots or 1) for host in hosts)


def _parse_line(content: str) -> list[Host]:
    if len(content.split()) > 1 or "=" in content or content.count(":") == 1:
        raise ValueError(
            f"{content!r} is more than a name. A nodefile has a host's name on each line, once for each rank"
        )
    return parse_hosts(content)


PBS = Dialect(
    name="pbs",
    title="PBS",
    parse=parse,
    write=write,
    unsaid=1,
    rule="a host runs one rank for each time it is named",
    carries=frozenset({"slots", "ipv6"}),
)
