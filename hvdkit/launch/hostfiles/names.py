"""Hosts, names of hosts and users, slots, and ranges of names as Slurm writes them: nid[001-004,007],login1.

Names become arguments of ssh and mpirun, so only the characters of a valid name are accepted. A range is a list, not a
set: ranks follow its order, and SLURM_TASKS_PER_NODE counts along it. ClusterShell's node sets are sorted and without
repetition, so they cannot replace this module; the tests compare with them where both mean the same.
Functions raise ValueError with a sentence for the user.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from hvdkit.ranges import split_range


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
    slots_hint: a message that matters only if the user has not set the slots; "" for none.
    ranks: number of tasks of the scheduler's job; None for one on each slot.
    more_slots_hint: how to get more slots from this source; "" for no special advice.
    allocated: from a scheduler's allocation (or the launcher pod of an MPIJob), not from the command line.
    interface: name of the network interface for all hosts; "" for hvdrun's choice.
    """

    hosts: tuple[Host, ...]
    source: str
    notes: tuple[str, ...] = ()
    ranks: int | None = None
    more_slots_hint: str = ""
    allocated: bool = False
    interface: str = ""
    slots_hint: str = ""


def merge_hosts(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Add up the slots of repeated hosts; each repetition of a host without slots adds one slot."""
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


def complete_slots(hosts: Iterable[Host], slots: int | None) -> tuple[Host, ...]:
    """Set the slots of every host without slots; None leaves each at the number of its cores."""
    return tuple(host if host.slots is not None else replace(host, slots=slots) for host in hosts)


def set_slots(hosts: Iterable[Host], slots: int) -> tuple[Host, ...]:
    """Set the slots of every host."""
    return tuple(replace(host, slots=slots) for host in hosts)


def format_hosts(hosts: Iterable[Host], most: int = 6) -> str:
    """Write hosts for a sentence: node1:4, node2:4, and so on up to `most`."""
    words = [f"{host.login}:{'cores' if host.slots is None else host.slots}" for host in hosts]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


#: More hosts than Slurm can have in a job: a limit for ranges with a typing error.
MOST_HOSTS = 65536

_NUMBERED = re.compile(r"(.*?)([0-9]{1,18})", re.ASCII | re.DOTALL)


def split_list(text: str) -> list[str]:
    """Split at the commas outside of brackets: "a[1,2],b" is "a[1,2]" and "b"."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth <= 0:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]


def expand(text: str) -> list[str]:
    """Expand a name with any number of ranges in brackets.

    Leading zeros are kept: n[08-10] is n08, n09, n10. Raises ValueError for invalid brackets.
    """
    if "[" not in text and "]" not in text:
        return [text]
    parts = re.split(r"\[([^][]*)\]", text)
    if any("[" in part or "]" in part for part in parts):
        raise ValueError(f"{text!r} has unbalanced brackets. Write ranges like nid[001-004,007]")
    choices: list[list[str]] = []
    count = 1
    for number, part in enumerate(parts):
        # One name more than allowed proves that the range is too large.
        found = list(itertools.islice(_expand_range(part, text), MOST_HOSTS + 1)) if number % 2 else [part]
        choices.append(found)
        count *= len(found)
        if count > MOST_HOSTS:
            raise ValueError(f"{text[:100]!r} expands to more than {MOST_HOSTS} hosts. Check the numbers in it")
    return ["".join(each) for each in itertools.product(*choices)]


def fold(names: Iterable[str]) -> str:
    """Write names with consecutive numbers as ranges, in their order: the inverse of `split_list` and `expand`."""
    groups: list[tuple[str, list[list[str]]]] = []
    for name in names:
        numbered = _NUMBERED.fullmatch(name)
        prefix, digits = numbered.groups() if numbered else (name, "")
        if digits and groups and groups[-1][0] == prefix and groups[-1][1]:
            runs = groups[-1][1]
            if digits == str(int(runs[-1][-1]) + 1).zfill(len(runs[-1][0])):
                runs[-1][1:] = [digits]
            else:
                runs.append([digits])
        else:
            groups.append((prefix, [[digits]] if digits else []))
    return ",".join(_write_group(prefix, runs) for prefix, runs in groups)


def _expand_range(inside: str, text: str) -> Iterator[str]:
    for item in inside.split(","):
        try:
            first, last = split_range(item)
        except ValueError:
            raise ValueError(f"{item!r} in {text!r} is not a number or a range of numbers like 001-004") from None
        if int(last) < int(first):
            raise ValueError(f"the range {item} in {text!r} is descending. Write {last}-{first}")
        if last.startswith("0") and len(last) > len(first):
            padded = first.zfill(len(last))
            raise ValueError(
                f"the range {item} in {text!r} has different numbers of leading zeros. Write {padded}-{last}"
            )
        if int(last) - int(first) >= MOST_HOSTS:
            raise ValueError(f"{text!r} expands to more than {MOST_HOSTS} hosts. Check the numbers in it")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _write_group(prefix: str, runs: list[list[str]]) -> str:
    if not runs:
        return prefix
    if len(runs) == 1 and len(runs[0]) == 1:
        return prefix + runs[0][0]
    return f"{prefix}[{','.join('-'.join(run) for run in runs)}]"


NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?", re.ASCII)
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*", re.ASCII)
_IPV6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9_][A-Za-z0-9_.-]*)?", re.ASCII)
_SLOTS = re.compile(r"[1-9][0-9]{0,5}", re.ASCII)


def parse_hosts(text: str) -> list[Host]:
    """Parse one word into hosts without slots: a name, user@name, IPv6, or a range of names like nid[001-004].

    An IPv6 address may have brackets, and must have them if a number follows: see `split_slots`.
    """
    user, at, name = text.rpartition("@")
    if at:
        check_user(user)
    if name.startswith("[") and name.endswith("]"):
        if not is_ipv6(name[1:-1]):
            raise ValueError(f"{name!r} is not an IPv6 address in brackets")
        return [Host(name[1:-1], None, user=user)]
    if is_ipv6(name):
        return [Host(name, None, user=user)]
    return [Host(check_name(each), None, user=user) for each in expand(name)]


def parse_list(text: str, parse: Callable[[str], list[Host]]) -> list[Host]:
    """Split at commas and parse each part with `parse`. ValueError also for more than MOST_HOSTS hosts."""
    hosts: list[Host] = []
    for part in split_list(text):
        hosts += parse(part.strip())
        if len(hosts) > MOST_HOSTS:
            raise ValueError(f"{text[:100]!r} expands to more than {MOST_HOSTS} hosts. Check the numbers in it")
    return hosts


def split_slots(text: str) -> tuple[str, str | None]:
    """Split host:4 into the host and its number, or None. An IPv6 address must be in brackets."""
    if text.startswith("[") or "@[" in text:
        address, bracket, rest = text.partition("]")
        if rest and not rest.startswith(":"):
            raise ValueError(f"{text!r} has {rest!r} after the address")
        return address + bracket, rest[1:] if rest else None
    if text.count(":") > 1:
        raise ValueError(f"{text!r} has more than one colon. Put an IPv6 address in brackets, like [fe80::1]:4")
    name, colon, slots = text.partition(":")
    return name, slots if colon else None


def check_name(text: str) -> str:
    """Return a valid name of a host unchanged."""
    if NAME.fullmatch(text) and len(text) <= 253:
        return text
    if text.startswith("-"):
        raise ValueError(
            f"{text!r} is not a host name: ssh and mpirun would read it as an option. A name begins with a letter or "
            "a digit"
        )
    raise ValueError(f"{text!r} is not a host name. Use letters, digits, dots and dashes, without a dash at either end")


def check_user(text: str) -> str:
    """Return a valid name of a user unchanged."""
    if not _USER.fullmatch(text):
        raise ValueError(f"{text!r} is not a user name. Use letters, digits, dots and dashes, beginning with a letter")
    return text


def parse_slots(key: str, text: str) -> int:
    """Parse the value of `key` as a number of slots."""
    if not _SLOTS.fullmatch(text):
        raise ValueError(f"{key}={text!r} is not a number from 1 to 999999")
    return int(text)


def is_slots(text: str) -> bool:
    """Is a word a number of slots?"""
    return _SLOTS.fullmatch(text) is not None


def is_ipv6(text: str) -> bool:
    """Is a word an IPv6 address, without brackets?"""
    if not _IPV6.fullmatch(text):
        return False
    try:
        ipaddress.IPv6Address(text.partition("%")[0])
    except ValueError:
        return False
    return True
