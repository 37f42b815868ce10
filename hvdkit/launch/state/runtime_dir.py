"""Temporary folders, for example for the sockets of a running job. Each is private, inside a private one of the user.

The process that uses a folder holds a lock on it, which the system releases when the process ends in any way. So a
folder without a lock was left by a killed job, and the start of the next job removes it. A lock may not be visible to
another host that shares the file system, so each running kernel has a folder of its own.

The user's folder is hvdkit-UID-BOOT. Another user may have made a folder of this name in /tmp: then it is
hvdkit-UID-BOOT-RANDOM, and a search of /tmp for folders of this user finds it.
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

#: Parents of the user's folder, best first: on the host itself, and the same for every shell. TMPDIR may be on a file
#: system that hosts share. /run/user (XDG_RUNTIME_DIR) is removed when the user logs out, while a job may continue.
PLACES = ("/tmp", f"/run/user/{os.getuid()}")


class RuntimeDirectory:
    """A folder for this process alone, created at once and removed by close(), or as a context manager.

    kind: "" for a job's folder, whose name is the number of the process; otherwise a prefix of the name.
    path: absolute.
    lock: the descriptor that holds the lock, also in a child that has it open.
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
        """Make the folder in `parent`; returns the problem, or ""."""
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
        """Return the folder's path."""
        return self.path

    def __exit__(self, *_: object) -> None:
        """Remove the folder."""
        self.close()


def find_jobs() -> dict[str, str]:
    """Find the folders of this user's jobs that are running on this host, by name."""
    found = {}
    for parent in (each for place in PLACES for each in _find_own(place)):
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(parent)):
                path = os.path.join(parent, name)
                if name[0].isdigit() and not _is_abandoned(path):
                    found[name] = path
    return found


def _find_free(place: str) -> str:
    """Find a free path for this user's folder in `place`, which has no such folder."""
    path = os.path.join(place, _name_folder())
    return path if not os.path.lexists(path) else f"{path}-{os.urandom(8).hex()}"


def _find_own(place: str) -> list[str]:
    """List this user's folders in `place`, by name, without folders of other users that have such names."""
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
    """Name the running kernel; locks work only between processes of the same kernel."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read(8)
    return socket.gethostname()


def _check(path: str) -> None:
    """Raise LaunchError if a folder is not private to this user: another user may have made it in /tmp."""
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
        return False  # it was removed, or is not a folder of hvdkit
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
