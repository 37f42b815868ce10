"""Limits, cores, clock, file systems and fast networks of this host."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import hvdkit
from hvdkit.tools.doctor.machine import UNLIMITED, Clock, Cpu, Fabrics, Limits


def read_limits() -> Limits:
    """Read the soft limits."""

    def limit(kind: int) -> int:
        soft = resource.getrlimit(kind)[0]
        return UNLIMITED if soft == resource.RLIM_INFINITY else soft

    return Limits(limit(resource.RLIMIT_MEMLOCK), limit(resource.RLIMIT_NOFILE), limit(resource.RLIMIT_NPROC))


def read_cpu() -> Cpu:
    """Read which cores there are, which may be used, and for how much of the time."""
    cores = os.cpu_count() or 1
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(cores)
    return Cpu(cores, tuple(allowed), parse_quota(_read("/sys/fs/cgroup/cpu.max")))


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


def read_fabrics(environ: Mapping[str, str]) -> Fabrics:
    """List InfiniBand's and Slingshot's devices, and NCCL's plugins in the library path."""
    folders = environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    plugins = [str(path) for folder in filter(None, folders) for path in sorted(Path(folder).glob("libnccl-net*.so*"))]
    return Fabrics(_list("/sys/class/infiniband"), _list("/sys/class/cxi"), tuple(plugins))


def find_filesystem(path: str, mounts: Iterable[str] | None = None) -> str:
    """Tell the kind of file system that a path lies on, as /proc/mounts has it; "" if that cannot be read."""
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
