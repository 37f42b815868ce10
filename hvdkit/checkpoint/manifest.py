"""The manifest of a checkpoint, written last: sizes and hashes of its files; a checkpoint is whole if they match."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hvdkit.checkpoint.files import open_regular

NAME = "manifest.json"
_FORMAT = 1
_LARGEST = 1 << 20
_BLOCK = 1 << 22


def write_manifest(folder: Path, about: Mapping[str, Any]) -> None:
    """Write sizes and hashes of all files of a folder; when this returns, all files are on the disk.

    about: further entries for human readers; must be JSON.
    """
    files = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            files[path.name] = {"bytes": os.fstat(file.fileno()).st_size, "sha256": _hash(file)}
            os.fsync(file.fileno())
    with (folder / NAME).open("x") as file:
        json.dump({"format": _FORMAT, "files": files, **about}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def find_flaw(folder: Path, names: Iterable[str] = (), *, hashed: bool = True) -> str:
    """Describe the flaw of a checkpoint; "" if it is whole.

    folder: its folder. names: files that it must have. hashed: compare hashes too, which reads all files.
    """
    try:
        listed = _read_manifest(folder / NAME)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        return f"{NAME} cannot be read: {error or type(error).__name__}"
    for name in names:
        if name not in listed:
            return f"{name} is not listed in {NAME}"
    flaws = (_compare(folder / name, size, digest if hashed else "") for name, (size, digest) in sorted(listed.items()))
    return next(filter(None, flaws), "")


def _compare(path: Path, size: int, digest: str) -> str:
    """Describe how a file differs from its entry; "" if it does not. digest: its hash; "" to compare only sizes."""
    try:
        with open_regular(path) as file:
            present = os.fstat(file.fileno()).st_size
            if present != size:
                return f"{path.name} has {present} bytes, but {size} were written"
            return (
                f"{path.name} was changed after it was written: its hash differs"
                if digest and _hash(file) != digest
                else ""
            )
    except (OSError, ValueError) as error:  # ValueError: the name has a null byte or a surrogate
        return f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}"


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Return size and hash of each file. Raises ValueError for an invalid manifest or names outside of the folder."""
    with open_regular(path) as file:
        manifest = json.loads(file.read(_LARGEST))
    if manifest["format"] != _FORMAT:
        raise ValueError(f"its format is {manifest['format']!r}, but this version of hvdkit reads format {_FORMAT}")
    files = {str(name): (int(file["bytes"]), str(file["sha256"])) for name, file in manifest["files"].items()}
    for name in files:
        if Path(name).name != name:
            raise ValueError(f"{name!r} is not a file name")
    return files


def _hash(file: Any) -> str:
    sha = hashlib.sha256()
    while block := file.read(_BLOCK):
        sha.update(block)
    return sha.hexdigest()
