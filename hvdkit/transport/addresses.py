"""By which addresses this host may be reached: of its interfaces, and towards another host. IPv4."""

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
    """Does the address stay within its host?"""
    return address.startswith("127.")


def read_interface(variables: Mapping[str, str]) -> str:
    """The interface that Gloo is to use; "" for none in particular. Torch's variable comes before Horovod's."""
    for name in ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"):
        if variables.get(name):
            return variables[name].partition(",")[0].strip()
    return ""


def address_of(interface: str) -> str:
    """The address of an interface, "eth0" say. Raises TransportError if there is none, with those that there are."""
    address = _look_up(interface)
    if address is None:
        there = ", ".join(f"{name} ({_look_up(name) or 'no address'})" for _, name in socket.if_nameindex())
        raise TransportError(
            f"Host {socket.gethostname()} has no interface {interface!r} with an IPv4 address; it has {there}. Set "
            "GLOO_SOCKET_IFNAME (horovodrun: --network-interfaces) to an interface that all hosts have."
        )
    return address


def address_towards(host: str) -> str:
    """The address from which this host would speak to another one; the loopback's if that is not known."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return LOOPBACK


def list_addresses(first: str) -> list[str]:
    """All addresses of this host: `first`, then the others, those of the loopback last."""
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
