"""The folder for node-shared memory, and what dead jobs left in it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from hvdkit.tools.doctor.look.system import find_filesystem
from hvdkit.tools.doctor.machine import Leftover, SharedMemory

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
