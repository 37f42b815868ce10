"""Memory that all ranks of a host share: a file in /dev/shm, which is unlinked as soon as all ranks have opened it.

If the ranks are killed before that, the file remains. Its creator holds a lock on the file, which the kernel releases
when the process ends; so the next creator of a segment detects and removes abandoned files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import socket
import time
import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hvdkit.errors import SharedMemoryError
from hvdkit.transport.api import Transport
from hvdkit.transport.small_collectives import broadcast_bytes, gather_ints

_PREFIX = "hvdkit-"
_YOUNG_S = 60.0  # a younger file may just have been made, and not be locked yet
_WAY_ON = "or set HVDKIT_TRANSPORT=mpi to run without shared memory (slower)"


class Segment:
    """Shared memory of one host, mapped in every rank of a group; open_segment() makes it.

    memory: (nbytes,) uint8, the same bytes in all ranks. descriptor: of the open file; -1 after close().
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor = descriptor
        self._close_descriptor = weakref.finalize(self, os.close, descriptor)
        self._close_descriptor.atexit = False
        self.memory: NDArray[np.uint8] = np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)

    def close(self) -> None:
        """Release the memory as soon as no array uses it any more; may be called twice."""
        self._close_descriptor()
        self.descriptor = -1
        # The mapping ends with the last view of it: the user's gradients may still use it.
        self.memory = np.empty(0, np.uint8)


def open_segment(group: Transport, parts: Sequence[int], directory: str) -> Segment:
    """Make memory of sum(parts) bytes that all ranks of `group` share; collective.

    parts: bytes that each rank of the group allocates (so that they are near that rank's core).
    Raises SharedMemoryError on every rank if there is too little of it, or if the ranks do not see the same directory.
    """
    total = sum(parts)
    path = os.path.join(directory, f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}") if group.rank == 0 else ""
    descriptor, failure = -1, 0
    try:
        try:
            if group.rank == 0:
                remove_abandoned(directory)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(descriptor, total)
        except OSError as error:
            failure = error.errno or errno.EIO
        shown = broadcast_bytes(group, b"" if failure else path.encode(), 0).decode()
        try:
            if group.rank != 0 and shown:
                descriptor = os.open(shown, os.O_RDWR | os.O_CLOEXEC)
            if descriptor >= 0 and parts[group.rank]:
                os.posix_fallocate(descriptor, sum(parts[: group.rank]), parts[group.rank])
        except OSError as error:
            failure = error.errno or errno.EIO
        failures = gather_ints(group, failure)
    finally:
        if group.rank == 0 and descriptor >= 0:
            os.unlink(path)
    if any(failures):
        if descriptor >= 0:
            os.ftruncate(descriptor, 0)  # so that _explain() counts it as free, even while others have the file open
            os.close(descriptor)
        raise SharedMemoryError(_explain(failures, total, directory))
    return Segment(descriptor, total)


def remove_abandoned(directory: str) -> None:
    """Remove files that killed ranks of this user have left in a memory file system."""
    for name in os.listdir(directory):
        if name.startswith(_PREFIX):
            with contextlib.suppress(OSError):  # another user's, in use, or already removed
                _remove_if_abandoned(os.path.join(directory, name))


def _remove_if_abandoned(path: str) -> None:
    found = os.lstat(path)
    if found.st_uid != os.getuid() or time.time() - found.st_mtime < _YOUNG_S:
        return
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    finally:
        os.close(descriptor)


def _explain(failures: Sequence[int], total: int, directory: str) -> str:
    host = socket.gethostname()
    who = ", ".join(f"local rank {rank}: {os.strerror(code)}" for rank, code in enumerate(failures) if code)
    if errno.ENOSPC in failures:
        free = os.statvfs(directory)
        return (
            f"Shared memory on {host} needs {total / 2**20:.1f} MiB in {directory}, but only "
            f"{free.f_bavail * free.f_frsize / 2**20:.1f} MiB are free. Enlarge it (in a container: --shm-size; as "
            f"root: mount -o remount,size=... {directory}), {_WAY_ON}. [{who}]"
        )
    if errno.ENOENT in failures[1:]:
        return (
            f"The ranks on {host} do not share {directory}; each of their containers may have its own: {who}. Share "
            f"it between the containers (docker --ipc=host), {_WAY_ON}."
        )
    return f"Shared memory could not be created in {directory} on {host}: {who}. Correct this, {_WAY_ON}."
