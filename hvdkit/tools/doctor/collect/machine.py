"""Cores, limits, clock, file systems, shared memory and addresses of this host."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import hvdkit
from hvdkit.launch.agent.host_info import read_interfaces
from hvdkit.launch.plan.network import InterfaceAddress, parse_interfaces
from hvdkit.launch.plan.resolve_hosts import is_own_address, resolve
from hvdkit.tools.doctor.facts import (
    UNLIMITED,
    Clock,
    CpuFacts,
    FastNetworks,
    HostNetwork,
    Leftover,
    Port,
    ResourceLimits,
    SharedMemory,
)


def read_limits() -> ResourceLimits:
    """Read the soft limits."""

    def limit(kind: int) -> int:
        soft = resource.getrlimit(kind)[0]
        return UNLIMITED if soft == resource.RLIM_INFINITY else soft

    return ResourceLimits(limit(resource.RLIMIT_MEMLOCK), limit(resource.RLIMIT_NOFILE), limit(resource.RLIMIT_NPROC))


def read_cpu() -> CpuFacts:
    """Read which cores there are, which may be used, and for how much of the time."""
    cores = os.cpu_count() or 1
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(cores)
    return CpuFacts(cores, tuple(allowed), parse_quota(_read("/sys/fs/cgroup/cpu.max")))


def parse_quota(text: str) -> float:
    """Turn cgroup's "150000 100000" into 1.5 cores; 0 for "max", or nothing."""
    words = text.split()
    if len(words) != 2 or not all(re.fullmatch("[0-9]{1,18}", word) for word in words) or not int(words[1]):
        return 0.0
    return int(words[0]) / int(words[1])


def read_clock() -> Clock:
    """Read the clock, and when hvdkit's own files were written."""
    newest = 0.0
    for path in Path(hvdkit.__file__).parent.glob("*.py"):
        with contextlib.suppress(OSError):
            newest = max(newest, path.stat().st_mtime)
    return Clock(time.time(), newest)


def read_fabrics(environ: Mapping[str, str]) -> FastNetworks:
    """List InfiniBand's and Slingshot's devices, and NCCL's plugins in the library path."""
    folders = environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    plugins = [str(path) for folder in filter(None, folders) for path in sorted(Path(folder).glob("libnccl-net*.so*"))]
    return FastNetworks(_list("/sys/class/infiniband"), _list("/sys/class/cxi"), tuple(plugins))


def find_filesystem(path: str, mounts: Iterable[str] | None = None) -> str:
    """Find the kind of file system of a path, as in /proc/mounts; "" if that cannot be read."""
    lines = _read("/proc/self/mounts").splitlines() if mounts is None else mounts
    real = os.path.realpath(path)
    best, kind = -1, ""
    for line in lines:
        words = line.split()
        if len(words) < 3:
            continue
        place = words[1].replace("\\040", " ")
        inside = place == "/" or real == place or real.startswith(f"{place}/")
        if inside and len(place) >= best:  # a later one lies over an earlier one
            best, kind = len(place), words[2]
    return kind


def _list(folder: str) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError:
        return ()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


#: As hvdkit, Open MPI, MPICH, Intel MPI, NCCL, torch, Gloo and Python's multiprocessing name theirs.
_NAMES = re.compile(
    r"hvdkit-.*|(vader|sm|smsc)_segment\..*|osc_rdma\..*|openmpi-.*|mpich_shar_.*|mpich-.*|Intel_MPI_.*|shm_mpi_.*"
    r"|nccl-.*|torch_\d+_.*|psm_[0-9a-f]+|psm2_.*|ucx_shm_.*|cma_.*"
)
#: A file may be made a moment before it is mapped.
_LEAST_AGE_S = 60.0


def read_shared_memory(folder: str) -> SharedMemory:
    """Measure the folder, and find this user's files there that none of the user's processes has mapped or open."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return SharedMemory(folder)
    return SharedMemory(folder, usage.total, usage.free, find_filesystem(folder), tuple(_find_leftovers(folder)))


def _find_leftovers(folder: str) -> Iterator[Leftover]:
    candidates = {path: info for path, info in _list_files(folder) if _NAMES.fullmatch(os.path.basename(path))}
    if not candidates:
        return
    used = set(_list_used(folder))
    for path, info in candidates.items():
        age = time.time() - max(info.st_mtime, info.st_ctime)
        if path not in used and age > _LEAST_AGE_S:
            yield Leftover(path, info.st_blocks * 512, round(age))


def _list_files(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    try:
        for entry in os.scandir(folder):
            info = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid():
                yield entry.path, info
    except OSError:
        return


def _list_used(folder: str) -> Iterator[str]:
    """Paths in the folder that processes have mapped or open, as far as this user may look."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # of another user, or gone
            yield from _paths_in(folder, (process / "maps").read_text(errors="replace").splitlines())
            yield from _paths_in(folder, [os.readlink(link) for link in (process / "fd").iterdir()])


def _paths_in(folder: str, lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        _, slash, rest = line.partition(f"{folder}/")
        if slash:
            yield f"{folder}/{rest}"


_LOOPBACK = InterfaceAddress("lo", "127.0.0.1", "127.0.0.0/8")


def read_network() -> HostNetwork:
    """Resolve this host's own name, and list its interfaces."""
    rows = read_interfaces()
    interfaces = [each for each in parse_interfaces(rows) if ":" not in each.address]
    return HostNetwork(
        resolve(socket.gethostname()),
        resolve("localhost"),
        (_LOOPBACK, *interfaces) if rows else (),
        is_own_address(_LOOPBACK.address),
    )


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
