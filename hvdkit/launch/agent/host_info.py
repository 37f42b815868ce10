"""What this host offers a rank: cores, GPUs, shared memory, interfaces, free ports. Cheap: every start waits for it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import sys
from collections.abc import Mapping

from .devices import read_gpus

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
                name, family = os.fsdecode(entry.name), entry.address.contents.family
                address, mask = (_bytes_of(each.contents, family) for each in (entry.address, entry.netmask))
                bits = bin(int.from_bytes(mask, "big")).count("1")
                found.append([name, socket.inet_ntop(family, address), bits, read_speed(name)])
            each = entry.next
    finally:
        libc.freeifaddrs(first)
    return found


# Where in a socket's address, after its family, the bytes of the host's stand.
_PLACES = {int(socket.AF_INET): slice(2, 6), int(socket.AF_INET6): slice(6, 22)}


def _bytes_of(address: _SocketAddress, family: int) -> bytes:
    return bytes(address.data)[_PLACES[family]]


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


#: Below the ports that systems give to outgoing connections (from 32768 on Linux) and Kubernetes to its services (from
#: 30000), so that nothing else takes one before the script does.
FIRST_PORT, LAST_PORT = 20000, 29999
#: For torch's store and for JAX's coordinator.
PORT_COUNT = 2
_PORT_TRIES = 200


def hold_free_ports(rank: int) -> dict[int, list[socket.socket]]:
    """Find ports that nothing uses at any address, if this is rank 0; fewer than PORT_COUNT if the host has too few.

    Each comes with sockets that hold it while they are open: no other job can hold it too, but a server with
    SO_REUSEADDR, as torch's store and gRPC's are, can listen there.
    """
    held: dict[int, list[socket.socket]] = {}
    for _ in range(_PORT_TRIES if rank == 0 else 0):
        if len(held) == PORT_COUNT:
            break
        port = FIRST_PORT + int.from_bytes(os.urandom(4), "big") % (LAST_PORT - FIRST_PORT + 1)
        sockets = _hold_port(port)
        if sockets is not None:
            held[port] = sockets
    return held


def _hold_port(port: int) -> list[socket.socket] | None:
    """Bind sockets to a port of all addresses; None if it is in use."""
    with contextlib.ExitStack() as undo:
        sockets = []
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                holder = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
                if family == socket.AF_INET6:
                    holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                holder.bind(("", port))
            except OSError as error:
                if family == socket.AF_INET or error.errno == errno.EADDRINUSE:
                    return None
                continue  # a host without IPv6
            sockets.append(holder)
        for holder in sockets:  # only now: with it before, a port could be bound that another job holds
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        undo.pop_all()
        return sockets
