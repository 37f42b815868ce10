"""Finds this host's IPv4 addresses: those of its interfaces, and the source address towards another host."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Mapping

from hvdkit.errors import TransportError

LOOPBACK = "127.0.0.1"

_SIOCGIFADDR = 0x8915


def is_loopback(address: str) -> bool:
    """Return whether this is a loopback address."""
    return address.startswith("127.")


def read_interface(variables: Mapping[str, str]) -> str:
    """Return the interface that the variables select for Gloo; "" for none. Torch's variable comes before Horovod's."""
    for name in ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"):
        if variables.get(name):
            return variables[name].partition(",")[0].strip()
    return ""


def address_of(interface: str) -> str:
    """Return the address of an interface such as "eth0". Raises TransportError, with the host's interfaces, if none."""
    address = _look_up(interface)
    if address is None:
        there = ", ".join(f"{name} ({_look_up(name) or 'no address'})" for _, name in socket.if_nameindex())
        raise TransportError(
            f"Host {socket.gethostname()} has no interface {interface!r} with an IPv4 address; it has {there}. Set "
            "GLOO_SOCKET_IFNAME (horovodrun: --network-interfaces) to an interface that all hosts have."
        )
    return address


def address_towards(host: str) -> str:
    """Return the address from which this host would send to another host; the loopback address if unknown."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return LOOPBACK


def list_addresses(first: str) -> list[str]:
    """Return all addresses of this host: `first`, then the others, loopback addresses last."""
    found = [_look_up(name) for _, name in socket.if_nameindex()]
    unique = dict.fromkeys([first, *(one for one in found if one is not None), LOOPBACK])
    return sorted(unique, key=is_loopback)


def _look_up(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
