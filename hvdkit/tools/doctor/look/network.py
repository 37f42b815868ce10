"""Addresses of this host."""

from __future__ import annotations

import array
import contextlib
import ipaddress
import socket
import struct
from pathlib import Path

from hvdkit.tools.doctor.machine import Interface, Network, Port

_LIST, _FLAGS, _MASK = 0x8912, 0x8913, 0x891B  # SIOCGIFCONF, SIOCGIFFLAGS, SIOCGIFNETMASK of Linux
_ENTRY, _UP, _LOOPBACK = 40, 0x1, 0x8
_BRIDGES = ("docker", "br-", "virbr", "cni", "podman", "lxcbr", "lxdbr", "flannel", "cali", "veth")


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
    """List every IPv4 address; () where the system cannot be asked."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            room = array.array("B", bytes(_ENTRY * 1024))
            answer = fcntl.ioctl(probe, _LIST, struct.pack("iL", len(room), room.buffer_info()[0]))
            used = struct.unpack("iL", answer)[0]
            entries = [room[start : start + _ENTRY].tobytes() for start in range(0, used, _ENTRY)]
            return tuple(_describe(probe.fileno(), entry) for entry in entries)
    except (ImportError, OSError):
        return ()


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


def _describe(probe: int, entry: bytes) -> Interface:
    import fcntl

    label = entry[:16].partition(b"\0")[0].decode()
    (flags,) = struct.unpack("H", fcntl.ioctl(probe, _FLAGS, entry)[16:18])
    mask = fcntl.ioctl(probe, _MASK, entry)[20:24]
    name = label.partition(":")[0]  # eth0:1 is a second address of eth0
    folder = Path("/sys/class/net", name)
    return Interface(
        name=name,
        address=str(ipaddress.IPv4Address(entry[20:24])),
        prefix=int.from_bytes(mask, "big").bit_count(),
        up=bool(flags & _UP),
        loopback=bool(flags & _LOOPBACK),
        bridge=name.startswith(_BRIDGES) or (folder / "bridge").is_dir(),
        mbit=_read_speed(folder, name),
    )


def _read_speed(folder: Path, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        # In a network namespace of its own a container may see the machine's interfaces here, not its own.
        if int((folder / "ifindex").read_text()) == socket.if_nametoindex(name):
            return max(0, int((folder / "speed").read_text()))
    return 0
