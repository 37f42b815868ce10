"""Variables that a framework shows as arrays, in a file: read without executing anything, and only where they fit."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hvdkit.transport.buffer import Array

_FILE = "arrays.npz"


class Variables(Protocol):
    """Variables, always the same ones, with a copy of them in memory."""

    def save(self) -> None:
        """Copy them."""

    def sync(self) -> None:
        """Give all ranks what rank 0 has; collective."""

    def arrays(self) -> Sequence[Array]:
        """What was copied last."""

    def assign(self, arrays: Sequence[Array]) -> None:
        """Overwrite them."""


class ArraysKept:
    """Lists of variables, under names; see Kept. framework: with its version."""

    files: Sequence[str] = (_FILE,)

    def __init__(self, framework: str, things: Mapping[str, Variables]) -> None:
        self.framework, self._things = framework, dict(things)

    def _arrays(self) -> dict[str, Sequence[Array]]:
        for one in self._things.values():
            one.save()
        return {name: one.arrays() for name, one in self._things.items()}

    def copy(self, folder: Path, *, during_epoch: bool) -> Callable[[], None]:
        """See Kept.copy."""
        arrays = {name: [one.copy() for one in some] for name, some in self._arrays().items()}
        return lambda: write_arrays(folder / _FILE, arrays)

    def read(self, folder: Path) -> None:
        """See Kept.read."""
        found = read_arrays(folder / _FILE, self._arrays())
        for name, one in self._things.items():
            one.assign(found[name])

    def share(self) -> None:
        """See Kept.share."""
        for one in self._things.values():
            one.sync()

    def digests(self) -> dict[str, str]:
        """See Kept.digests."""
        return {name: digest_of(some) for name, some in self._arrays().items()}

    def record(self, samples: int | None) -> None:
        """See Kept.record; there is no sampler."""

    def read_random(self) -> dict[str, Any]:
        """See Kept.read_random; there is nothing that would be known here."""
        return {}

    def set_random(self, state: dict[str, Any]) -> None:
        """See Kept.set_random."""

    def settle(self) -> None:
        """See Kept.settle; steps have ended here when they return."""


def digest_of(arrays: Sequence[Array]) -> str:
    """A hash of arrays, with their dtypes and shapes."""
    sha = hashlib.sha256()
    for one in arrays:
        sha.update(f"{one.dtype} {one.shape}".encode() + one.tobytes())
    return sha.hexdigest()


def write_arrays(path: Path, arrays: Mapping[str, Sequence[Array]]) -> None:
    """Make a file (.npz) of lists of arrays."""
    flat = {f"{name}.{at}": _plain(one) for name, some in arrays.items() for at, one in enumerate(some)}
    with path.open("xb") as file:
        np.savez(file, **flat)  # type: ignore[arg-type]


def read_arrays(path: Path, like: Mapping[str, Sequence[Array]]) -> dict[str, list[Array]]:
    """What write_arrays() has written. like: names, and arrays of the dtypes and shapes that there have to be.

    Raises ValueError for a file that holds others, or is none.
    """
    wanted = {f"{name}.{at}" for name, some in like.items() for at in range(len(some))}
    try:
        with np.load(path, allow_pickle=False) as found:
            if different := sorted(wanted ^ set(found.files)):
                raise ValueError(f"{', '.join(different[:3])} is in one only of {path.name} and what is to be kept")
            return {
                name: [_fit(found[f"{name}.{at}"], one, f"{name}.{at}") for at, one in enumerate(some)]
                for name, some in like.items()
            }
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error


def _plain(array: Array) -> Array:
    """With a dtype that numpy has by itself."""
    return array if array.dtype.kind in "biufc" else array.view(f"u{array.dtype.itemsize}")


def _fit(array: Array, like: Array, name: str) -> Array:
    if array.shape != like.shape or array.dtype != _plain(like).dtype:
        raise ValueError(f"{name} is {array.dtype} {array.shape}, and {_plain(like).dtype} {like.shape} is to be kept")
    return array.view(like.dtype)
