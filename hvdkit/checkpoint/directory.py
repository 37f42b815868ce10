"""The directory of checkpoints: each is a numbered folder, which is created atomically by a rename."""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hvdkit.checkpoint.manifest import find_flaw, sync_folder, write_manifest
from hvdkit.log import logger

_NAME = re.compile(r"checkpoint-(\d{6,})")
#: Name of a folder that is being written or removed, with host, process and a number.
_TEMPORARY = re.compile(r"\.hvdkit-(?P<host>.+)-(?P<process>\d+)-\d+")
#: Folders of processes on other hosts, which cannot be checked, are removed if nothing in them has changed for so long.
_ABANDONED_S = 3600.0


class CheckpointDirectory:
    """The checkpoints in the folder `path`, to which one job at a time writes; the first checkpoint creates it.

    keep: number of whole checkpoints that are kept after a new checkpoint is written.
    """

    def __init__(self, path: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; it must be 1 or more.")
        self.path, self.keep = Path(path).absolute(), keep
        self._count = 0

    def numbers(self) -> list[int]:
        """Return the numbers of all checkpoints, whole or damaged, newest first."""
        try:
            matches = [_NAME.fullmatch(name) for name in os.listdir(self.path)]
        except FileNotFoundError:
            return []
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def folder(self, number: int) -> Path:
        """Return the folder of a checkpoint."""
        return self.path / f"checkpoint-{number:06}"

    def newest_whole(self, names: Iterable[str], skipped: Callable[[Path, str], object]) -> int | None:
        """Return the number of the newest whole checkpoint with these files; None if there is none.

        skipped: called for each newer damaged checkpoint, with its folder and its flaw.
        """
        for number in self.numbers():
            flaw = find_flaw(self.folder(number), names)
            if not flaw:
                return number
            skipped(self.folder(number), flaw)
        return None

    def begin(self) -> Path:
        """Make a folder for a new checkpoint, for commit(). Removes unfinished folders of jobs that have ended."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        folder = self._temporary()
        folder.mkdir()
        return folder

    @contextmanager
    def removing(self, folder: Path) -> Iterator[None]:
        """Return a context that removes the folder if its body raises."""
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            yield
            undo.pop_all()

    def commit(self, folder: Path, about: Mapping[str, Any]) -> int:
        """Rename the folder to a checkpoint, and remove old checkpoints; return the new checkpoint's number.

        When this returns, the checkpoint is on the disk. about: see write_manifest().
        """
        write_manifest(folder, about)
        number = max(self.numbers(), default=0)
        while True:
            number += 1
            try:
                folder.rename(self.folder(number))
                break
            except OSError:  # another job has taken the number
                if not self.folder(number).exists():
                    raise
        sync_folder(self.path)
        self._rotate()
        return number

    def _rotate(self) -> None:
        """Remove checkpoints older than the newest `keep` whose files have the right sizes."""
        whole = 0
        for number in self.numbers():
            if whole == self.keep:
                self._remove(self.folder(number))
            elif not find_flaw(self.folder(number), hashed=False):
                whole += 1

    def _remove(self, folder: Path) -> None:
        """Remove an old checkpoint; of a symbolic link the link. An error is a warning: the new checkpoint is whole."""
        removed = self._temporary()
        try:
            folder.rename(removed)  # a partly removed checkpoint would look like a damaged checkpoint
            if removed.is_dir() and not removed.is_symlink():
                shutil.rmtree(removed)
            else:
                removed.unlink()
        except OSError as error:
            logger.warning(
                "The new checkpoint is saved, but the old checkpoint %s cannot be removed: %s. Remove %s yourself.",
                *(folder, error, removed if os.path.lexists(removed) else folder),
            )

    def _temporary(self) -> Path:
        self._count += 1
        return self.path / f".hvdkit-{socket.gethostname()}-{os.getpid()}-{self._count}"

    def _remove_leftovers(self) -> None:
        for path in self.path.iterdir():
            match = _TEMPORARY.fullmatch(path.name)
            if match and _is_left_over(path, match["host"], int(match["process"])):
                shutil.rmtree(path, ignore_errors=True)


def _is_left_over(path: Path, host: str, process: int) -> bool:
    """Return whether the process that wrote the folder has ended."""
    if host == socket.gethostname():
        return process != os.getpid() and not _is_alive(process)
    try:
        return time.time() - max(entry.stat().st_mtime for entry in (path, *path.iterdir())) > _ABANDONED_S
    except OSError:
        return False


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's process
    return True
