"""Hosts and their slots, from `-H` or from a hostfile in Open MPI's dialect."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from hvdkit.errors import HostfileError, LaunchError

# Names end up on command lines (ssh, mpirun), so nothing but the letters that a name can have gets in.
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9_.-]+)?")
_SLOTS = re.compile(r"[1-9][0-9]{0,5}")
_KEYS = {"slots": "slots", "max_slots": "max_slots", "max-slots": "max_slots"}


@dataclass(frozen=True)
class Host:
    """A machine and how many ranks it may run.

    name: a host name or an address; an IPv6 address without its brackets.
    slots: None if the file does not say: as many as the host has cores.
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


def parse_host_list(text: str) -> tuple[Host, ...]:
    """Parse `-H`: host:slots,host,user@host:slots,[IPv6]:slots; a bare host has one slot, repeated hosts add up.

    Raises LaunchError naming every part that cannot be used.
    """
    hosts: list[Host] = []
    problems: list[str] = []
    for part in text.split(","):
        host, problem = _try(_parse_part, part.strip())
        hosts += host
        problems += problem
    if problems:
        raise LaunchError(f"-H {text!r}: {'; '.join(problems)}. Write it like -H node1:4,node2:4.")
    return merge_hosts(hosts)


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Parse a hostfile in Open MPI's dialect; hostfiles/README.md has the grammar.

    path: for the messages.
    Raises HostfileError with every problem of the file.
    """
    hosts: list[Host] = []
    problems: list[str] = []
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        content = line.partition("#")[0].strip()
        if content:
            host, problem = _try(_parse_line, content)
            hosts += host
            problems += [f"{number}: {why}" for why in problem]
    if not hosts and not problems:
        problems.append(" names no host. Write one host a line, like: node1 slots=4")
    if problems:
        raise HostfileError(path, problems)
    return merge_hosts(hosts)


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Read and parse a hostfile.

    Raises HostfileError for one that cannot be read or used.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise HostfileError(path, [f" is not a text file ({error.reason} at byte {error.start})"]) from None
    except ValueError as error:
        raise HostfileError(path, [f" cannot be read: {error}"]) from None
    except OSError as error:
        raise HostfileError(path, [f" cannot be read: {error.strerror}. Check the path after --hostfile"]) from None
    return parse_hostfile(text, path)


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


def _try(parse: Callable[[str], Host], text: str) -> tuple[list[Host], list[str]]:
    try:
        return [parse(text)], []
    except ValueError as problem:
        return [], [str(problem)]


def _add(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def _parse_part(part: str) -> Host:
    if not part:
        raise ValueError("there is a host missing at a comma")
    if part.startswith("[") or "@[" in part:
        address, bracket, rest = part.partition("]")
        name, slots = address + bracket, rest.removeprefix(":") if rest else "1"
        if rest and not rest.startswith(":"):
            raise ValueError(f"{part!r} has {rest!r} after the address")
    elif part.count(":") > 1:
        raise ValueError(f"{part!r} has more than one colon; put an IPv6 address in brackets, like [fe80::1]:4")
    else:
        name, colon, slots = part.partition(":")
        slots = slots if colon else "1"
    host = _parse_name(name)
    return replace(host, slots=_parse_slots("slots", slots))


def _parse_line(content: str) -> Host:
    name, *words = re.sub(r"\s*=\s*", "=", content).split()
    if "=" in name:
        raise ValueError(f"{name!r} stands where the host's name should be. Write: node1 slots=4")
    values: dict[str, int] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in _KEYS:
            raise ValueError(
                f"{word!r} is not understood. Use slots=N or max_slots=N after the name, like: node1 slots=4"
            )
        if _KEYS[key] in values:
            raise ValueError(f"{key} is given twice. Leave one of them out")
        values[_KEYS[key]] = _parse_slots(key, text)
    host = replace(_parse_name(name), slots=values.get("slots"), max_slots=values.get("max_slots"))
    if host.slots and host.max_slots and host.max_slots < host.slots:
        raise ValueError(f"max_slots={host.max_slots} is below slots={host.slots}. Raise it or leave it out")
    return host


def _parse_name(text: str) -> Host:
    user, at, name = text.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise ValueError(f"{user!r} before the @ is not a user name")
    if name.startswith("[") and name.endswith("]"):
        if not _IPV6.fullmatch(name[1:-1]):
            raise ValueError(f"{name!r} is not an IPv6 address in brackets")
        return Host(name[1:-1], user=user)
    if _NAME.fullmatch(name):
        return Host(name, user=user)
    host, colon, slots = name.partition(":")
    if colon and _NAME.fullmatch(host) and _SLOTS.fullmatch(slots):
        raise ValueError(f"{name!r} is MPICH's way to write it. In Open MPI's dialect it is: {host} slots={slots}")
    if _IPV6.fullmatch(name):
        raise ValueError(f"{name!r} looks like an IPv6 address; put it in brackets: [{name}]")
    raise ValueError(f"{name!r} is not a host name: letters, digits, dots and dashes, and no dash at the ends")


def _parse_slots(key: str, text: str) -> int:
    if not _SLOTS.fullmatch(text):
        raise ValueError(f"{key}={text!r} is not a number from 1 to 999999")
    return int(text)
