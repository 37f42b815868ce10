"""Names and nothing else, one a line, each once (ColossalAI, scontrol show hostnames)."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.launch.hosts.dialect import Dialect
from hvdkit.launch.hosts.host import Host
from hvdkit.launch.hosts.names import parse_hosts
from hvdkit.launch.hosts.reading import Reading, content_lines, read_lines


def parse(text: str) -> Reading:
    """Read names; one that is repeated is a problem, as nobody knows what it means."""
    seen: set[str] = set()

    def parse_line(content: str) -> list[Host]:
        hosts = parse_hosts(content)
        for host in hosts:
            if host.login in seen:
                raise ValueError(f"{host.login} is named again. Name it once, and say --slots-per-host; or it is PBS's")
            seen.add(host.login)
        return hosts

    return read_lines(content_lines(text), parse_line)


def write(hosts: Sequence[Host]) -> str:
    """Write names."""
    return "".join(f"{host.login}\n" for host in hosts)


PLAIN = Dialect(
    name="plain",
    title="plain names",
    parse=parse,
    write=write,
    unsaid=None,
    rule="a host may run as many ranks as it has cores",
    carries=frozenset({"user", "ipv6"}),
    could_be=lambda text: False,
)
