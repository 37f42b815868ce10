"""Safe access to files of a checkpoint from an untrusted source: limits the kinds of files and their memory."""

from __future__ import annotations

import errno
import os
import stat
import zipfile
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError for any other file, which could block forever or never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(
            errno.EINVAL, f"it is a {_KINDS.get(stat.S_IFMT(mode), 'special file')}, not a regular file", str(path)
        )
    return os.fdopen(descriptor, "rb")


def check_regular(folder: Path) -> None:
    """Raise OSError if a folder has a FIFO, a device or a socket, before code opens its files by name."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_file() and not entry.is_dir():
                open_regular(Path(entry.path)).close()


def check_archive(file: BinaryIO, name: str) -> None:
    """Raise ValueError for a zip archive whose entries are larger than the file, by compression or overlap.

    torch and numpy write neither. A file that is no zip archive passes. name: the file's name, for the error.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{entry.filename} in {name} is compressed, which no checkpoint of hvdkit is")
        size, total = os.fstat(file.fileno()).st_size, sum(entry.file_size for entry in entries)
        if total > size:
            raise ValueError(f"{name} has {size} bytes, but {total} bytes in its entries")
    file.seek(0)
