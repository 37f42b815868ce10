"""Folders for what is of a moment: the sockets of a running job, say. Each is private, in a private one of the user's.

Whoever works in a folder holds a lock on it, which the system takes away when the process ends, however it does. So
what a killed job has left is told from what is in use, and goes when the next one starts. A lock may say nothing to
another host that shares the file system, so each running kernel has a folder of its own.

The user's folder is hvdkit-UID-BOOT. Anybody can make that in /tmp first: then it is hvdkit-UID-BOOT-RANDOM, and a
search of /tmp for folders of this user finds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import re
import shutil
import socket
import stat
from collections.abc import Iterator

from hvdkit.errors import LaunchError

#: Where the user's folder may be, best first: on the host itself, and found alike from every shell. TMPDIR may be on a
#: file system that hosts share. /run/user (XDG_RUNTIME_DIR) goes when the user logs out, while a job may go on.
PLACES = ("/tmp", f"/run/user/{os.getuid()}")


class RuntimeDirectory:
    """A folder for this process alone, made at once and removed by close(), or as a context manager.

    kind: "" for a job's, which is called by the process's number; else a word before that. path: absolute. lock: the
    descriptor that holds the lock, also in a child that has it open.
    """

    def __init__(self, kind: str = "") -> None:
        problems = []
        for place in PLACES:
            own = _find_own(place)
            for parent in own:
                with contextlib.suppress(OSError), _locked(parent):
                    _remove_abandoned(parent)
            for parent in own or [_find_free(place)]:
                problem = self._make(parent, f"{kind}-{os.getpid()}" if kind else str(os.getpid()))
                if not problem:
                    return
                problems.append(f"{parent}: {problem}")
        raise LaunchError(
            "No folder can be made for the files and sockets of running jobs:\n  " + "\n  ".join(problems) + "\n"
            f"Make {' or '.join(PLACES)} a folder that you can write, on a file system of this host that has locks "
            "(flock), as tmpfs has.",
            code="no-runtime-directory",
        )

    def _make(self, parent: str, word: str) -> str:
        """Make the folder in this one; returns why that cannot be, "" if it is made."""
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(parent, 0o700)
            _check(parent)
            with _locked(parent):
                names = (word if n == 1 else f"{word}-{n}" for n in range(1, 1000))  # containers may share /tmp
                self.name = next(name for name in names if not os.path.lexists(os.path.join(parent, name)))
                self.path = os.path.join(parent, self.name)
                os.mkdir(self.path, 0o700)
                self.lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(self.lock, fcntl.LOCK_EX)
        except (OSError, LaunchError) as error:
            return getattr(error, "strerror", None) or str(error)
        return ""

    def close(self) -> None:
        """Remove the folder with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)

    def __enter__(self) -> str:
        """The folder's path."""
        return self.path

    def __exit__(self, *_: object) -> None:
        """Remove the folder."""
        self.close()


def find_jobs() -> dict[str, str]:
    """The folders of this user's jobs that are running on this host, by name."""
    found = {}
    for parent in (each for place in PLACES for each in _find_own(place)):
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(parent)):
                path = os.path.join(parent, name)
                if name[0].isdigit() and not _is_abandoned(path):
                    found[name] = path
    return found


def _find_free(place: str) -> str:
    """A path for this user's folder in a place where there is none."""
    path = os.path.join(place, _name_folder())
    return path if not os.path.lexists(path) else f"{path}-{os.urandom(8).hex()}"


def _find_own(place: str) -> list[str]:
    """The folders of this user in a place, by name; what other users have made under such names is left out."""
    names = re.compile(re.escape(_name_folder()) + "(-[0-9a-f]{16})?")
    found = []
    with contextlib.suppress(OSError):
        for name in sorted(filter(names.fullmatch, os.listdir(place))):
            with contextlib.suppress(OSError, LaunchError):
                _check(os.path.join(place, name))
                found.append(os.path.join(place, name))
    return found


def _name_folder() -> str:
    return f"hvdkit-{os.getuid()}-{_name_kernel()}"


def _name_kernel() -> str:
    """A name for the running kernel, which processes must share for a lock to mean anything between them."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read(8)
    return socket.gethostname()


def _check(path: str) -> None:
    """Raise LaunchError if a folder is not this user's alone: anybody may have made one of this name in /tmp."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        cure = "Remove it." if found.st_uid == os.getuid() else "The administrator can remove it."
        raise LaunchError(
            f"it must be a folder that only you can open, and it is {stat.filemode(found.st_mode)} of user "
            f"{_name_user(found.st_uid)}. {cure}",
            code="runtime-directory-unsafe",
        )


def _name_user(number: int) -> str:
    with contextlib.suppress(KeyError):
        return f"{pwd.getpwuid(number).pw_name} ({number})"
    return str(number)


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
