"""The line grammars of host lists: `host key=N`, `host:N`, and a host repeated once for each rank.

Line parsers raise ValueError with a sentence for the user. `read_lines` collects these problems, so that all problems
of a file are reported together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from hvdkit.launch.hostfiles.host import Host, merge_hosts
from hvdkit.launch.hostfiles.names import (
    MOST_HOSTS,
    NAME,
    check_name,
    check_user,
    is_slots,
    parse_hosts,
    parse_slots,
    split_slots,
)

_ASSIGNMENT = re.compile(r"\s*(?:export\s+)?([A-Z_][A-Z0-9_]*)=(.*)", re.ASCII | re.DOTALL)
# Keys of Open MPI's old hostfiles.
_UNSUPPORTED = {
    "port": "Write the port for that host in ~/.ssh/config, as 'Port N'",
    **dict.fromkeys(
        ("boards", "sockets", "sockets_per_board", "sockets-per-board", "cores", "cores_per_socket"),
        "Leave it out: mpirun detects the hardware of a host",
    ),
}


@dataclass(frozen=True)
class Reading:
    """A text as parsed in one dialect.

    hosts: each once; slots None where the text gives none.
    problems: (line, problem and solution), lines counted from 1; the hosts are not valid if there are any.
    notes: what was parsed and is not used.
    """

    hosts: tuple[Host, ...]
    problems: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()


def content_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, line) for lines with content, without comments (#) and surrounding blanks."""
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        content = line.partition("#")[0].strip()
        if content:
            yield number, content


def read_lines(
    lines: Iterable[tuple[int, str]],
    parse_line: Callable[[str], Iterable[Host]],
    merge: Callable[[Iterable[Host]], tuple[Host, ...]] = merge_hosts,
) -> Reading:
    """Parse numbered lines with `parse_line`; merge: makes one host of repeated ones."""
    hosts: list[Host] = []
    problems: list[tuple[int, str]] = []
    for number, content in lines:
        try:
            hosts += parse_line(content)
        except ValueError as problem:
            problems.append((number, str(problem)))
        if len(hosts) > MOST_HOSTS:
            problems.append((number, f"the file has more than {MOST_HOSTS} hosts up to here. Check the ranges above"))
            return Reading((), tuple(problems))
    return Reading(merge(hosts), tuple(problems))


def keep_first(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Merge hosts where a repeated one counts once."""
    return tuple({host.login: host for host in hosts}.values())


def count_repeats(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Merge hosts where a line is a slot: if one host is repeated, those without repetition have one slot."""
    merged = merge_hosts(hosts)
    if any(host.slots is not None for host in merged):
        return tuple(replace(host, slots=host.slots or 1) for host in merged)
    return merged


def refuse_repeats(parse_line: Callable[[str], list[Host]], why: str) -> Callable[[str], list[Host]]:
    """Extend a line parser: a host that an earlier line has is a problem. why: the rest of the sentence."""
    logins: set[str] = set()

    def parse_once(content: str) -> list[Host]:
        hosts = parse_line(content)
        for host in hosts:
            if host.login in logins:
                raise ValueError(f"{host.login} is repeated{why}")
            logins.add(host.login)
        return hosts

    return parse_once


def parse_keyed(content: str, keys: Mapping[str, str]) -> list[Host]:
    """Parse a host followed by key=number words.

    keys: word -> slots, max_slots or user.
    """
    name, *words = "=".join(part.strip() for part in content.split("=")).split()
    if name.startswith("-"):
        check_name(name)
    if "=" in name:
        raise ValueError(f"{name!r} is where the host name should be. Write: node1 slots=4")
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key in _UNSUPPORTED:
            raise ValueError(f"{word!r} is not supported. {_UNSUPPORTED[key]}")
        if not equals or key not in keys:
            raise ValueError(
                f"{word!r} is not a valid word here. Use slots=N or max_slots=N after the name, like: node1 slots=4"
            )
        if keys[key] in values:
            raise ValueError(f"{key} is given twice. Remove one of them")
        values[keys[key]] = value
    slots, most = (parse_slots(key, values[key]) if key in values else None for key in ("slots", "max_slots"))
    hosts = [replace(host, slots=slots, max_slots=most) for host in _parse_bare_name(name)]
    if "user" in values:
        hosts = [replace(host, user=check_user(values["user"])) for host in hosts]
    if slots and most and most < slots:
        raise ValueError(f"max_slots={most} is below slots={slots}. Raise max_slots or remove it")
    return hosts


def parse_numbered(word: str) -> list[Host]:
    """Parse host or host:slots."""
    if not word:
        raise ValueError("a host name is missing next to a comma")
    name, slots = split_slots(word)
    hosts = parse_hosts(name)
    return hosts if slots is None else [replace(host, slots=parse_slots("slots", slots)) for host in hosts]


def parse_single_name(content: str) -> list[Host]:
    """Parse a line with a host's name alone, as a nodefile has it once for each rank."""
    if len(content.split()) > 1 or "=" in content or content.count(":") == 1:
        raise ValueError(
            f"{content!r} is more than a host name. A nodefile has one host name per line, repeated once for each rank"
        )
    return parse_hosts(content)


def parse_assignment(line: str) -> tuple[str, str] | None:
    """Split NAME=value or export NAME="value" of a shell; None for any other line."""
    match = _ASSIGNMENT.fullmatch(line)
    if match is None:
        return None
    value = match[2].strip()
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    return match[1], value


def require_slots(hosts: list[Host], content: str, tool: str) -> list[Host]:
    """Return hosts that all have slots. Raises ValueError for one without."""
    if any(host.slots is None for host in hosts):
        raise ValueError(f"{content!r} has no slots, and {tool} has no default. Write: {hosts[0].login} slots=4")
    return hosts


def _parse_bare_name(name: str) -> list[Host]:
    host, colon, slots = name.rpartition(":")
    if colon and NAME.fullmatch(host.rpartition("@")[2]) and is_slots(slots):
        raise ValueError(f"{name!r} is MPICH's format. In Open MPI's format write: {host} slots={slots}")
    if name.startswith("^"):
        raise ValueError(f"{name!r} excludes a host, which hvdrun does not support. Remove the line of that host")
    if name.startswith("+"):
        raise ValueError(f"{name!r} is a relative index, which hvdrun does not support. Write the host's name")
    return parse_hosts(name)
