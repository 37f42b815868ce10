"""DeepSpeed's hostfile: node1 slots=4, every host once."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.launch.hosts.dialect import Dialect
from hvdkit.launch.hosts.host import Host
from hvdkit.launch.hosts.openmpi import parse_keyed
from hvdkit.launch.hosts.reading import Reading, content_lines, read_lines


def parse(text: str) -> Reading:
    """Read a hostfile of DeepSpeed, user@host included, which DeepSpeed itself has taken for no host at all."""
    seen: set[str] = set()

    def parse_line(content: str) -> list[Host]:
        hosts = parse_keyed(content, {"slots": "slots"})
        if any(host.slots is None for host in hosts):
            raise ValueError(f"{content!r} has no slots, and DeepSpeed has no default. Write: {hosts[0].login} slots=4")
        for host in hosts:
            if host.login in seen:
                raise ValueError(f"{host.login} is named again, which DeepSpeed refuses. Add its slots up in one line")
            seen.add(host.login)
        return hosts

    return read_lines(content_lines(text), parse_line)


def write(hosts: Sequence[Host]) -> str:
    """Write a hostfile of DeepSpeed."""
    return "".join(f"{host.login} slots={host.slots}\n" for host in hosts)


DEEPSPEED = Dialect(
    name="deepspeed",
    title="DeepSpeed",
    parse=parse,
    write=write,
    unsaid=1,
    rule="every host has slots, and is named once",
    carries=frozenset({"slots", "user"}),
)
