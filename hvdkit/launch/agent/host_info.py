"""What this host offers a rank: cores, GPUs, shared memory, interfaces. Cheap, since every start waits for it."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Mapping

from .gpus import read_gpus

_UP, _LOOPBACK = 0x1, 0x8
# InfiniBand and RoCE, Slingshot, Omni-Path, and what Open MPI and MPICH reach them through.
_FABRICS = ("/sys/class/infiniband", "/sys/class/cxi", "/sys/class/hfi1_user")


class _SocketAddress(ctypes.Structure):
    _fields_ = (("family", ctypes.c_uint16), ("data", ctypes.c_uint8 * 26))


class _Entry(ctypes.Structure):
    """What getifaddrs(3) returns a list of, on Linux."""


_Entry._fields_ = (
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SocketAddress)),
    ("netmask", ctypes.POINTER(_SocketAddress)),
)


def read_interfaces() -> list[list[object]]:
    """List [name, address, length of the subnet's prefix, Mbit/s or 0] of each address that is up, without loopback's.

    Empty where the system is not Linux.
    """
    if not sys.platform.startswith("linux"):
        return []
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Entry)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        return []
    found: list[list[object]] = []
    try:
        each = first
        while each:
            entry = each.contents
            wanted = entry.flags & _UP and not entry.flags & _LOOPBACK
            if wanted and entry.address and entry.netmask and entry.address.contents.family in _PLACES:
                name = os.fsdecode(entry.name)
                mask = _bytes_of(entry.netmask.contents, entry.address.contents.family)
                bits = bin(int.from_bytes(mask, "big")).count("1")
                found.append([name, _text_of(entry.address.contents), bits, read_speed(name)])
            each = entry.next
    finally:
        libc.freeifaddrs(first)
    return found


# Where in a socket's address, after its family, the bytes of the host's stand.
_PLACES = {int(socket.AF_INET): slice(2, 6), int(socket.AF_INET6): slice(6, 22)}


def _bytes_of(address: _SocketAddress, family: int) -> bytes:
    return bytes(address.data)[_PLACES[family]]


def _text_of(address: _SocketAddress) -> str:
    return socket.inet_ntop(address.family, _bytes_of(address, address.family))


def read_speed(name: str) -> int:
    """Tell how many Mbit/s an interface can do; 0 if it does not say."""
    try:
        with open(f"/sys/class/net/{name}/speed") as file:
            return max(0, int(file.read()))
    except (OSError, ValueError):
        return 0


def has_fabric() -> bool:
    """Tell whether MPI might have something better than TCP to other hosts."""
    return any(os.path.isdir(folder) and os.listdir(folder) for folder in _FABRICS)


def probe_host(environ: Mapping[str, str]) -> dict[str, object]:
    """Report the cores that may be used, their number, GPUs, MiB free for shared memory (-1: none) and the Python."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return {
        "allowed": allowed,
        "cores": os.cpu_count() or 1,
        "shared_mib": _free_mib(environ.get("HVDKIT_SHARED_DIRECTORY") or "/dev/shm"),
        "python": ".".join(map(str, sys.version_info[:3])),
        "gpus": read_gpus(environ),
    }


def _free_mib(folder: str) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return -1
    return found.f_bavail * found.f_frsize >> 20
