"""Folders for what is of a moment: the sockets of a running job, say. Each is private, in a private one of the user's.

Whoever works in a folder holds a lock on it, which the system takes away when the process ends, however it does. So
what a killed job has left is told from what is in use, and goes when the next one starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator

from hvdkit.errors import LaunchError

_LONGEST = 80  # a socket's path has room for about 107 bytes


class OwnFolder:
    """A folder for this process alone, made at once and removed by close(), or as a context manager.

    kind: "" for a job's, which is called by the process's number; else a word before that. path: absolute.
    """

    def __init__(self, kind: str = "") -> None:
        parent = _make_users_folder()
        with _locked(parent):
            _remove_abandoned(parent)
            word = f"{kind}-{os.getpid()}" if kind else str(os.getpid())
            names = (word if n == 1 else f"{word}-{n}" for n in range(1, 1000))  # containers may share /tmp
            self.name = next(name for name in names if not os.path.lexists(os.path.join(parent, name)))
            self.path = os.path.join(parent, self.name)
            os.mkdir(self.path, 0o700)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove the folder with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def __enter__(self) -> str:
        """The folder's path."""
        return self.path

    def __exit__(self, *_: object) -> None:
        """Remove the folder."""
        self.close()


def find_jobs() -> dict[str, str]:
    """The folders of this user's jobs that are running on this host, by name."""
    found = {}
    for parent in dict.fromkeys(_candidates()):
        with contextlib.suppress(OSError, LaunchError):
            _check(parent)
            for name in sorted(os.listdir(parent)):
                path = os.path.join(parent, name)
                if name[0].isdigit() and not _is_abandoned(path):
                    found[name] = path
    return found


def _candidates() -> list[str]:
    name = f"hvdkit-{os.getuid()}"
    own = os.path.join(tempfile.gettempdir(), name)
    return [own, os.path.join("/tmp", name)] if len(os.fsencode(own)) <= _LONGEST else [os.path.join("/tmp", name)]


def _make_users_folder() -> str:
    path = _candidates()[0]
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        _check(path)
    except OSError as error:
        raise LaunchError(
            f"{path}, for the files and sockets of running jobs, cannot be made: {error.strerror}. Set TMPDIR to a "
            "folder that can be written."
        ) from None
    return path


def _check(path: str) -> None:
    """Raise LaunchError if a folder is not this user's alone; anybody may have made one of this name in /tmp."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise LaunchError(
            f"{path} should be a folder that only you can open, and is something else: {stat.filemode(found.st_mode)}, "
            f"owner {found.st_uid}. Remove it, or set TMPDIR to a folder of your own."
        )


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _remove_abandoned(parent: str) -> None:
    for name in os.listdir(parent):
        path = os.path.join(parent, name)
        if _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: str) -> bool:
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False  # gone by now, or nothing of ours
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
