"""Addresses of this host."""

from __future__ import annotations

import socket

from hvdkit.launch import network
from hvdkit.launch.agent import interfaces
from hvdkit.launch.network import parse_interfaces
from hvdkit.tools.doctor.machine import Interface, Network, Port

_LOOPBACK = "127.0.0.1"


def read_network() -> Network:
    """Look up this host's own name, and list its interfaces."""
    return Network(resolve(socket.gethostname()), resolve("localhost"), read_interfaces())


def resolve(name: str) -> tuple[str, ...]:
    """Find the addresses of a host; () if there is none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def read_interfaces() -> tuple[Interface, ...]:
    """List every IPv4 address that is up, loopback's first; () where the system cannot be asked."""
    rows = interfaces.read_interfaces()
    return (*_read_loopback(), *map(_describe, filter(_is_ipv4, parse_interfaces(rows)))) if rows else ()


def read_port(text: str) -> Port:
    """Find out whether a port is free on this host; text: a number, else it counts as free."""
    if not text.isdecimal() or not 0 < int(text) < 65536:
        return Port()
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(text)))
        except OSError:
            return Port(int(text), free=False)
    return Port(int(text))


def _read_loopback() -> tuple[Interface, ...]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((_LOOPBACK, 0))
        except OSError:
            return (Interface("lo", _LOOPBACK, 8, up=False, loopback=True),)
    return (Interface("lo", _LOOPBACK, 8, loopback=True),)


def _describe(found: network.Interface) -> Interface:
    bits = int(found.subnet.rpartition("/")[2])
    return Interface(found.name, found.address, bits, bridge=not found.between_hosts, mbit=found.speed)


def _is_ipv4(found: network.Interface) -> bool:
    return ":" not in found.address
