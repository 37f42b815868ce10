"""What this host would give a rank: cores, shared memory, its Python. Cheap, since every start waits for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping


def look_around(environ: Mapping[str, str]) -> dict[str, object]:
    """Tell the cores that may be used and how many there are, MiB free for shared memory (-1: none), the Python."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return {
        "allowed": allowed,
        "cores": os.cpu_count() or 1,
        "shared_mib": _free_mib(environ.get("HVDKIT_SHARED_DIRECTORY") or "/dev/shm"),
        "python": ".".join(map(str, sys.version_info[:3])),
    }


def _free_mib(folder: str) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return -1
    return found.f_bavail * found.f_frsize >> 20
