"""Read this host's resources for a rank: CPUs, GPUs, shared memory, interfaces, free ports. Fast: each start waits.

CPUs are divided among the ranks: divide() plans, bind() acts. GPUs are read from /proc and /sys, because the vendors'
tools may take seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdkit.gpu_vendors import Folders, list_gpus, read_seen
from hvdkit.ranges import read_ranges

SYSTEM = Path("/sys/devices/system")


class Cpu(NamedTuple):
    """A hardware thread, by its number.

    core: the lowest number of the hardware threads of its physical core. node: of its NUMA node, or of its socket if
    the system shows no nodes.
    """

    number: int
    core: int
    node: int


def read_topology(cpus: Iterable[int], system: Path = SYSTEM) -> tuple[Cpu, ...]:
    """Look up these CPUs. Without information each is a core of its own, on node 0. system: /sys/devices/system."""
    nodes = {
        number: int(folder.name[len("node") :])
        for folder in system.glob("node/node[0-9]*")
        for number in parse_cpus(_read_text(folder / "cpulist"))
    }
    found = []
    for number in sorted(cpus):
        topology = system / f"cpu/cpu{number}/topology"
        siblings = parse_cpus(_read_text(topology / "core_cpus_list") or _read_text(topology / "thread_siblings_list"))
        socket = _read_text(topology / "physical_package_id")
        node = nodes.get(number, int(socket) if re.fullmatch(r"\d+", socket) else 0)
        found.append(Cpu(number, min([number, *siblings]), node))
    return tuple(found)


_MOST_CPUS = 10**4


def parse_cpus(text: str) -> list[int]:
    """Read a list such as "0-3,8" in ascending order; [] for any other form."""
    try:
        return sorted(set(read_ranges(text, _MOST_CPUS)))
    except ValueError:
        return []


def format_cpus(cpus: Iterable[int]) -> str:
    """Write a set such as {0, 1, 2, 3, 8} as "0-3,8"."""
    ranges: list[list[int]] = []
    for number in sorted(cpus):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


_DRIVER, _DEVICES = Path("/proc/driver/nvidia/gpus"), Path("/sys/bus/pci/devices")
_KFD = Path("/sys/class/kfd/kfd/topology/nodes")


def find_gpus(environ: Mapping[str, str], folders: Folders) -> tuple[str, list[list[str]]]:
    """List [name, CPUs near it, as "0-31"] of each GPU, in the runtime's order; both are "" if the order is unknown.

    environ: of the rank. folders: of the kernel. Returns the vendor's name too, and no GPU if the rank sees none, if
    the kernel shows none here, or if CUDA_VISIBLE_DEVICES names parts of GPUs (MIG) or a GPU twice.
    """
    vendor, gpus = list_gpus(folders, environ)
    return vendor.name, read_seen(vendor, gpus, environ)


def read_gpus(environ: Mapping[str, str], driver: Path = _DRIVER, devices: Path = _DEVICES) -> list[list[str]]:
    """List the GPUs of find_gpus() in these folders; the name of NVIDIA's is the PCI bus id."""
    return find_gpus(environ, Folders(devices, _KFD, driver))[1]


class Share(NamedTuple):
    """A rank's CPUs. cpus: those it may run on. threads: number to compute with, one a core. bound: hvdkit binds it."""

    cpus: frozenset[int]
    threads: int
    bound: bool = False


def divide(cpus: Sequence[Cpu], ranks: int, kind: str) -> list[Share] | None:
    """Divide CPUs among the ranks of a host, in rank order; None if the host has fewer cores than ranks.

    Each rank gets whole, consecutive cores, at least the number of cores divided by ranks and rounded down. They are of
    one node unless a rank would get fewer cores for that. kind: "core" for just these cores, "numa" for all CPUs of
    their nodes.
    """
    cores: dict[tuple[int, int], list[Cpu]] = {}
    for cpu in sorted(cpus, key=lambda one: (one.node, one.core, one.number)):
        cores.setdefault((cpu.node, cpu.core), []).append(cpu)
    if len(cores) < ranks:
        return None
    nodes: dict[int, set[int]] = {}
    for cpu in cpus:
        nodes.setdefault(cpu.node, set()).add(cpu.number)
    shares = []
    for names in _cut(list(cores), ranks):
        mine = {cpu.number for name in names for cpu in cores[name]}
        if kind == "numa":
            mine = set().union(*(nodes[node] for node, _ in names))
        shares.append(Share(frozenset(mine), len(names), bound=True))
    return shares


def divide_near(cpus: Sequence[Cpu], near: Sequence[str], kind: str) -> list[Share] | None:
    """Divide the CPUs near GPUs among the ranks that have these GPUs; None if a rank would have no core of its own.

    near: the CPUs near the GPU of each rank, as "0-31". kind: see divide(). CPUs that are near no rank's GPU go unused.
    """
    ranks: dict[tuple[Cpu, ...], list[int]] = {}  # ranks by the CPUs near their GPUs
    for at, text in enumerate(near):
        numbers = set(parse_cpus(text))
        ranks.setdefault(tuple(cpu for cpu in cpus if cpu.number in numbers), []).append(at)
    if len({cpu for mine in ranks for cpu in mine}) < sum(map(len, ranks)):
        return None  # the CPUs near two GPUs overlap partly
    found: dict[int, Share] = {}
    for mine, places in ranks.items():
        shares = divide(mine, len(places), kind)
        if shares is None:
            return None
        found.update(zip(places, shares, strict=True))
    return [found[at] for at in range(len(near))]


def _cut(cores: Sequence[tuple[int, int]], ranks: int) -> list[Sequence[tuple[int, int]]]:
    """Divide (node, core), in order, into consecutive cores for each rank."""
    by_node: dict[int, list[tuple[int, int]]] = {}
    for core in cores:
        by_node.setdefault(core[0], []).append(core)
    least = len(cores) // ranks
    room = [len(of_node) // least for of_node in by_node.values()]  # how many ranks with `least` cores fit on each node
    if ranks < len(by_node) or sum(room) < ranks:
        return _even(cores, ranks)
    counts = [0] * len(room)
    sizes = [len(of_node) for of_node in by_node.values()]
    for _ in range(ranks):  # goes to the node with most cores for another rank
        open_nodes = [at for at, most in enumerate(room) if counts[at] < most]
        counts[max(open_nodes, key=lambda at: sizes[at] / (counts[at] + 1))] += 1
    pieces = zip(by_node.values(), counts, strict=True)
    return [piece for of_node, count in pieces if count for piece in _even(of_node, count)]


def _even(cores: Sequence[tuple[int, int]], pieces: int) -> list[Sequence[tuple[int, int]]]:
    edges = [len(cores) * piece // pieces for piece in range(pieces + 1)]
    return [cores[edges[piece] : edges[piece + 1]] for piece in range(pieces)]


def plan_share(allowed: Collection[int], order: Mapping[str, Any], local_size: int) -> Share:
    """Plan this rank's CPUs.

    allowed: CPUs that it may run on since its start. order: see hvdkit.launch.plan.registration; {} without hvdrun.
    local_size: number of ranks of this host; 0 if unknown.
    """
    if "divide" in order:
        ranks = int(order["ranks"])
        cpus, kind, near = read_topology(order["divide"]), str(order["kind"]), order.get("near")
        shares = (divide_near(cpus, near, kind) if near else None) or divide(cpus, ranks, kind)
        return shares[int(order["at"])] if shares else Share(frozenset(allowed), 1)
    cores = len({cpu.core for cpu in read_topology(allowed)})
    return Share(frozenset(allowed), max(1, cores // (int(order.get("sharers", 0)) or local_size or 1)))


def allowed_cpus() -> frozenset[int]:
    """Return the CPUs that this process may run on."""
    return frozenset(os.sched_getaffinity(0))


@contextlib.contextmanager
def bind(share: Share) -> Iterator[str]:
    """Bind processes that are started inside this context to the share's CPUs; yields the problem, or ""."""
    if not share.bound:
        yield ""
        return
    before = os.sched_getaffinity(0)
    problem = ""
    try:
        os.sched_setaffinity(0, share.cpus)
    except OSError as error:
        problem = error.strerror or str(error)
    try:
        yield problem
    finally:
        os.sched_setaffinity(0, before)


_UP, _LOOPBACK = 0x1, 0x8
# Folders of InfiniBand and RoCE, of Slingshot and of Omni-Path, which Open MPI and MPICH use.
_FABRICS = ("/sys/class/infiniband", "/sys/class/cxi", "/sys/class/hfi1_user")


class _SocketAddress(ctypes.Structure):
    _fields_ = (("family", ctypes.c_uint16), ("data", ctypes.c_uint8 * 26))


class _Entry(ctypes.Structure):
    """An entry of the list that getifaddrs(3) returns on Linux."""


_Entry._fields_ = (
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SocketAddress)),
    ("netmask", ctypes.POINTER(_SocketAddress)),
)


def read_interfaces() -> list[list[object]]:
    """List [name, address, length of the subnet's prefix, Mbit/s or 0] of each address that is up, except loopback."""
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
                address, mask = (bytes(each.contents.data)[_PLACES[family]] for each in (entry.address, entry.netmask))
                bits = bin(int.from_bytes(mask, "big")).count("1")
                found.append([name, socket.inet_ntop(family, address), bits, read_speed(name)])
            each = entry.next
    finally:
        libc.freeifaddrs(first)
    return found


# Family -> the bytes of the host's address in a socket's address, after its family.
_PLACES = {int(socket.AF_INET): slice(2, 6), int(socket.AF_INET6): slice(6, 22)}


def read_speed(name: str) -> int:
    """Read the speed of an interface in Mbit/s; 0 if it shows none."""
    try:
        with open(f"/sys/class/net/{name}/speed") as file:
            return max(0, int(file.read()))
    except (OSError, ValueError):
        return 0


def has_fabric() -> bool:
    """Does this host have a network faster than TCP that MPI may use?"""
    return any(os.path.isdir(folder) and os.listdir(folder) for folder in _FABRICS)


def probe_host(environ: Mapping[str, str]) -> dict[str, object]:
    """Report the usable CPUs, the number of cores, GPUs, free shared memory in MiB (-1: none) and Python's version."""
    vendor, gpus = find_gpus(environ, Folders(_DEVICES, _KFD, _DRIVER))
    return {
        "allowed": sorted(allowed_cpus()),
        "cores": os.cpu_count() or 1,
        "shared_mib": _free_mib(environ.get("HVDKIT_SHARED_DIRECTORY") or "/dev/shm"),
        "python": ".".join(map(str, sys.version_info[:3])),
        "gpus": gpus,
        "gpu_vendor": vendor,
    }


def _free_mib(folder: str) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return -1
    return found.f_bavail * found.f_frsize >> 20


#: Ports for torch's store and for JAX's coordinator.
PORT_COUNT = 2


def hold_free_ports(rank: int) -> list[socket.socket]:
    """On rank 0, bind sockets to PORT_COUNT ports that are free at all addresses; fewer if the host has no more.

    While they are open no other program gets these ports, but a server with SO_REUSEADDR, such as torch's store or
    gRPC's, can listen there.
    """
    held: list[socket.socket] = []
    with contextlib.suppress(OSError):  # then the ranks get no MASTER_PORT
        while rank == 0 and len(held) < PORT_COUNT:
            held.append(_hold_free_port())
    return held


def _hold_free_port() -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    holder = socket.socket(socket.AF_INET6 if dual else socket.AF_INET, socket.SOCK_STREAM)
    if dual:
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    holder.bind(("", 0))
    # Set only after the bind: set before it, a port could be bound that another job holds.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder
