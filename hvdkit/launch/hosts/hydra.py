"""MPICH's hostfile, for Hydra's -f: node1:4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hvdkit.launch.hosts.dialect import Dialect
from hvdkit.launch.hosts.horovod import parse_part
from hvdkit.launch.hosts.host import Host
from hvdkit.launch.hosts.names import check_user
from hvdkit.launch.hosts.reading import Reading, content_lines, read_lines


def parse(text: str) -> Reading:
    """Read a hostfile of MPICH."""
    notes: list[str] = []

    def parse_line(content: str) -> list[Host]:
        place, *words = content.split()
        hosts = parse_part(place)
        for word in words:
            key, equals, value = word.partition("=")
            if key == "user" and equals:
                hosts = [replace(host, user=check_user(value)) for host in hosts]
            elif key in ("binding", "ifname") and equals:
                notes.append(f"{key}= is not used: hvdrun does not bind, and has --network-interfaces for the wire")
            else:
                raise ValueError(
                    f"{word!r} is not understood. After the host there may be user=NAME, like: {place} user=me"
                )
        return hosts

    return read_lines(content_lines(text), parse_line, notes=notes)


def write(hosts: Sequence[Host]) -> str:
    """Write a hostfile of MPICH."""
    return "".join(f"{host.name}:{host.slots}{f' user={host.user}' if host.user else ''}\n" for host in hosts)


HYDRA = Dialect(
    name="hydra",
    title="MPICH",
    parse=parse,
    write=write,
    unsaid=1,
    rule="a host without a number runs one rank",
    carries=frozenset({"slots", "user"}),
)
