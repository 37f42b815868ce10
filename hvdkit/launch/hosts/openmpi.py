"""Open MPI's hostfile (also PRRTE's): node1 slots=4 max_slots=8."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from hvdkit.launch.hosts.dialect import Dialect
from hvdkit.launch.hosts.host import Host
from hvdkit.launch.hosts.names import NAME, check_name, check_user, is_slots, parse_hosts, parse_slots
from hvdkit.launch.hosts.reading import Reading, content_lines, read_lines

# Open MPI's own synonyms.
_KEYS = {
    **dict.fromkeys(("slots", "cpu", "count"), "slots"),
    **{
        f"{a}{joint}{b}": "max_slots"
        for joint in "_-"
        for word in ("slots", "cpu", "count")
        for a, b in (("max", word), (word, "max"))
    },
    **dict.fromkeys(("username", "user_name", "user-name"), "user"),
}
_NOT_USED = {
    "port": "Write the port for that host in ~/.ssh/config, as 'Port N'",
    **dict.fromkeys(
        ("boards", "sockets", "sockets_per_board", "sockets-per-board", "cores", "cores_per_socket"),
        "Leave it out: mpirun finds out by itself what a host is made of",
    ),
}


def parse(text: str) -> Reading:
    """Read a hostfile of Open MPI."""
    lines = ((number, line) for number, line in content_lines(text) if not line.startswith("//"))
    return read_lines(lines, _parse_line)


def write(hosts: Sequence[Host]) -> str:
    """Write a hostfile of Open MPI."""
    return "".join(_write_line(host) for host in hosts)


def parse_keyed(content: str, keys: dict[str, str]) -> list[Host]:
    """Read a line of a host and key=number words. Raises ValueError for what it cannot have.

    keys: word -> slots, max_slots or user.
    """
    name, *words = "=".join(part.strip() for part in content.split("=")).split()
    if name.startswith("-"):
        check_name(name)
    if "=" in name:
        raise ValueError(f"{name!r} stands where the host's name should be. Write: node1 slots=4")
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key in _NOT_USED:
            raise ValueError(f"{word!r} is not used. {_NOT_USED[key]}")
        if not equals or key not in keys:
            raise ValueError(
                f"{word!r} is not understood. Use slots=N or max_slots=N after the name, like: node1 slots=4"
            )
        if keys[key] in values:
            raise ValueError(f"{key} is given twice. Leave one of them out")
        values[keys[key]] = value
    slots, most = (parse_slots(key, values[key]) if key in values else None for key in ("slots", "max_slots"))
    hosts = [replace(host, slots=slots, max_slots=most) for host in _parse_name(name)]
    if "user" in values:
        hosts = [replace(host, user=check_user(values["user"])) for host in hosts]
    if slots and most and most < slots:
        raise ValueError(f"max_slots={most} is below slots={slots}. Raise it or leave it out")
    return hosts


def _parse_line(content: str) -> Iterable[Host]:
    if re.match(r"rank\s+[0-9]+\s*=", content):
        raise ValueError(f"{content!r} is a line of a rankfile, which hvdrun does not take. Write: node1 slots=4")
    return parse_keyed(content, _KEYS)


def _parse_name(name: str) -> list[Host]:
    host, colon, slots = name.rpartition(":")
    if colon and NAME.fullmatch(host.rpartition("@")[2]) and is_slots(slots):
        raise ValueError(f"{name!r} is MPICH's way to write it. In Open MPI's dialect it is: {host} slots={slots}")
    if name.startswith("^"):
        raise ValueError(f"{name!r} excludes a host. Leave the line of that host out")
    if name.startswith("+"):
        raise ValueError(f"{name!r} counts along an allocation. Write the host's name")
    return parse_hosts(name)


def _write_line(host: Host) -> str:
    slots = f" slots={host.slots}" if host.slots is not None else ""
    most = f" max_slots={host.max_slots}" if host.max_slots is not None else ""
    return f"{host.login}{slots}{most}\n"


OPENMPI = Dialect(
    name="openmpi",
    title="Open MPI",
    parse=parse,
    write=write,
    unsaid=None,
    rule="a host without slots may run as many ranks as it has cores, and each time it is repeated counts one",
    carries=frozenset({"slots", "max_slots", "user", "ipv6"}),
)
