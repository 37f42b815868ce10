"""The folder that checkpoints are in: each a folder with a number, there as a whole or not at all."""

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

_NAME = re.compile(r"checkpoint-(\d{6,})")
#: What is being written, or removed: host, process and a number.
_UNDER_WAY = re.compile(r"\.hvdkit-(?P<host>.+)-(?P<process>\d+)-\d+")
#: Nobody writes for so long; what a dead job has left on a host that cannot be asked is older one day.
_ABANDONED_S = 3600.0


class Shelf:
    """Checkpoints in the folder `path`, which one job at a time writes; made with the first of them.

    keep: how many.
    """

    def __init__(self, path: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least 1 checkpoint has to be kept.")
        self.path, self.keep = Path(path).absolute(), keep
        self._count = 0

    def numbers(self) -> list[int]:
        """Of the checkpoints that are there, whole or not, the newest first."""
        try:
            found = [_NAME.fullmatch(name) for name in os.listdir(self.path)]
        except FileNotFoundError:
            return []
        return sorted((int(one[1]) for one in found if one), reverse=True)

    def folder(self, number: int) -> Path:
        """Where a checkpoint is."""
        return self.path / f"checkpoint-{number:06}"

    def newest_whole(self, names: Iterable[str], skipped: Callable[[Path, str], object]) -> int | None:
        """The newest checkpoint that is whole, with these files; None if there is none.

        skipped: told of each one that is newer and not whole, and what is wrong with it.
        """
        for number in self.numbers():
            flaw = find_flaw(self.folder(number), names)
            if not flaw:
                return number
            skipped(self.folder(number), flaw)
        return None

    def begin(self) -> Path:
        """A folder to write a checkpoint into, for commit(); what dead jobs have left is removed."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        folder = self._under_way()
        folder.mkdir()
        return folder

    @contextmanager
    def removing(self, folder: Path) -> Iterator[None]:
        """Remove the folder if what is done within raises."""
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            yield
            undo.pop_all()

    def commit(self, folder: Path, about: Mapping[str, Any]) -> int:
        """Make what was written a checkpoint, remove those that are too many; returns its number.

        When this returns it is on the disk. about: see write_manifest.
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
        """Remove what is older than the newest `keep` that seem whole."""
        whole = 0
        for number in self.numbers():
            if whole == self.keep:
                gone = self._under_way()
                self.folder(number).rename(gone)  # a half removed one would look like a damaged one
                shutil.rmtree(gone)
            elif not find_flaw(self.folder(number), hashed=False):
                whole += 1

    def _under_way(self) -> Path:
        self._count += 1
        return self.path / f".hvdkit-{socket.gethostname()}-{os.getpid()}-{self._count}"

    def _remove_leftovers(self) -> None:
        for path in self.path.iterdir():
            found = _UNDER_WAY.fullmatch(path.name)
            if found and _is_left_over(path, found["host"], int(found["process"])):
                shutil.rmtree(path, ignore_errors=True)


def _is_left_over(path: Path, host: str, process: int) -> bool:
    """Is nobody writing it any more?"""
    if host == socket.gethostname():
        return process != os.getpid() and not _is_alive(process)
    try:
        return time.time() - max(one.stat().st_mtime for one in (path, *path.iterdir())) > _ABANDONED_S
    except OSError:
        return False


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    return True
