"""Names of hosts and users, and numbers of slots: what is one, and what is wrong with what is none.

Names end up on command lines (ssh, mpirun), so nothing but the letters that a name can have gets in.
All raise ValueError with a sentence for the user.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable

from hvdkit.launch.hosts.host import Host
from hvdkit.launch.hosts.ranges import MOST_HOSTS, expand, split_list

NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?", re.ASCII)
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*", re.ASCII)
_IPV6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9_][A-Za-z0-9_.-]*)?", re.ASCII)
_SLOTS = re.compile(r"[1-9][0-9]{0,5}", re.ASCII)


def parse_hosts(text: str) -> list[Host]:
    """Turn one word into hosts whose slots are not said: a name, user@name, IPv6, or names folded as nid[001-004].

    An IPv6 address may have brackets, and needs them only where a number follows: see `split_slots`.
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
    """Read names with commas between them, each with `parse`. ValueError also for more than there can be."""
    hosts: list[Host] = []
    for part in split_list(text):
        hosts += parse(part.strip())
        if len(hosts) > MOST_HOSTS:
            raise ValueError(f"{text[:100]!r} stands for more than {MOST_HOSTS} hosts. Check the numbers in it")
    return hosts


def split_slots(text: str) -> tuple[str, str | None]:
    """Split host:4 into the host and its number; None if there is no number. An IPv6 address has to be in brackets."""
    if text.startswith("[") or "@[" in text:
        address, bracket, rest = text.partition("]")
        if rest and not rest.startswith(":"):
            raise ValueError(f"{text!r} has {rest!r} after the address")
        return address + bracket, rest[1:] if rest else None
    if text.count(":") > 1:
        raise ValueError(f"{text!r} has more than one colon; put an IPv6 address in brackets, like [fe80::1]:4")
    name, colon, slots = text.partition(":")
    return name, slots if colon else None


def check_name(text: str) -> str:
    """Return the name of a host as it is, if it is one."""
    if NAME.fullmatch(text) and len(text) <= 253:
        return text
    if text.startswith("-"):
        raise ValueError(
            f"{text!r} is not a host name: ssh and mpirun would take it for an option. A name begins with a letter or "
            "a digit"
        )
    raise ValueError(f"{text!r} is not a host name: letters, digits, dots and dashes, and no dash at the ends")


def check_user(text: str) -> str:
    """Return a user's name as it is, if it is one."""
    if not _USER.fullmatch(text):
        raise ValueError(f"{text!r} is not a user name: letters, digits, dots and dashes, and a letter first")
    return text


def parse_slots(key: str, text: str) -> int:
    """Turn the value of `key` into a number of slots."""
    if not _SLOTS.fullmatch(text):
        raise ValueError(f"{key}={text!r} is not a number from 1 to 999999")
    return int(text)


def is_slots(text: str) -> bool:
    """Whether a word could be a number of slots."""
    return _SLOTS.fullmatch(text) is not None


def is_ipv6(text: str) -> bool:
    """Whether a word is an IPv6 address, without brackets."""
    if not _IPV6.fullmatch(text):
        return False
    try:
        ipaddress.IPv6Address(text.partition("%")[0])
    except ValueError:
        return False
    return True
