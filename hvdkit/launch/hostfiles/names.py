"""Names of hosts and users, and numbers of slots, checked.

Names become arguments of ssh and mpirun, so only the characters of a valid name are accepted.
All functions raise ValueError with a sentence for the user.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable

from hvdkit.launch.hostfiles.host import Host
from hvdkit.launch.hostfiles.ranges import MOST_HOSTS, expand, split_list

NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?", re.ASCII)
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*", re.ASCII)
_IPV6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9_][A-Za-z0-9_.-]*)?", re.ASCII)
_SLOTS = re.compile(r"[1-9][0-9]{0,5}", re.ASCII)


def parse_hosts(text: str) -> list[Host]:
    """Parse one word into hosts without slots: a name, user@name, IPv6, or a range of names like nid[001-004].

    An IPv6 address may have brackets, and must have them where a number follows: see `split_slots`.
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
