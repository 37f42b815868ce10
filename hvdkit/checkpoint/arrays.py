"""Saves variables as arrays in an .npz file, and reads it without executing code, if names, dtypes and shapes match."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit.checkpoint.files import check_archive, open_regular
from hvdkit.transport.buffer import Array

_FILE = "arrays.npz"


class SavedVariables:
    """A fixed list of variables, with a copy of their values in memory; also a Handler of elastic.state.

    owner: name of the variables' owner, for errors.
    list_variables: returns the variables, each of which has assign().
    view: returns a variable's values, which are copied at once.
    broadcast: overwrites variables on all ranks with the values of a rank; collective.
    """

    def __init__(
        self,
        owner: str,
        list_variables: Callable[[], Sequence[Any]],
        view: Callable[[Any], Array],
        broadcast: Callable[[Sequence[Any], int], Any],
    ) -> None:
        self._owner, self._list_variables, self._view, self._broadcast = owner, list_variables, view, broadcast
        self._saved = [np.array(view(variable)) for variable in list_variables()]

    def save(self) -> None:
        """Copy the values to the memory of the last copy."""
        for copy, variable in zip(self._saved, self.variables(), strict=True):
            np.copyto(copy, self._view(variable))

    def restore(self) -> None:
        """Overwrite the variables with the copy."""
        self.assign(self._saved)

    def sync(self) -> None:
        """Broadcast the values of rank 0; collective. Does not copy them."""
        self._broadcast(self.variables(), 0)

    def arrays(self) -> Sequence[Array]:
        """Return the copy."""
        return self._saved

    def assign(self, arrays: Sequence[Array]) -> None:
        """Overwrite the variables with these values."""
        for variable, value in zip(self.variables(), arrays, strict=True):
            variable.assign(value)

    def variables(self) -> Sequence[Any]:
        """Return the variables. Raises ValueError if their number has changed since the creation of this object."""
        variables = self._list_variables()
        if len(variables) != len(self._saved):
            raise ValueError(
                f"{self._owner} had {len(self._saved)} variables when its state was created, and has "
                f"{len(variables)} now. Build it before creating the state: with keras.Input, model.build() or "
                "optimizer.build(model.trainable_variables)."
            )
        return variables


class CheckpointableArrays:
    """See Checkpointable: named lists of variables. framework: its name and version."""

    files: Sequence[str] = (_FILE,)

    def __init__(self, framework: str, things: Mapping[str, SavedVariables]) -> None:
        self.framework, self._things = framework, dict(things)

    def _arrays(self) -> dict[str, Sequence[Array]]:
        for variables in self._things.values():
            variables.save()
        return {name: variables.arrays() for name, variables in self._things.items()}

    def collect(self) -> None:
        """See Checkpointable.collect; it does nothing, because every rank has all variables."""

    def copy(self, folder: Path, *, during_epoch: bool) -> Callable[[], None]:
        arrays = {name: [array.copy() for array in values] for name, values in self._arrays().items()}
        return lambda: write_arrays(folder / _FILE, arrays)

    def read(self, folder: Path) -> None:
        arrays = read_arrays(folder / _FILE, self._arrays())
        for name, variables in self._things.items():
            variables.assign(arrays[name])

    def share(self) -> None:
        for variables in self._things.values():
            variables.sync()

    def digests(self) -> dict[str, str]:
        return {name: digest_of(values) for name, values in self._arrays().items()}

    def record(self, samples: int | None) -> None:
        """See Checkpointable.record; it does nothing, because no sampler is saved."""

    def read_random(self) -> dict[str, Any]:
        """See Checkpointable.read_random; this framework's generators are not saved."""
        return {}

    def set_random(self, state: dict[str, Any]) -> None:
        """See Checkpointable.set_random."""

    def settle(self) -> None:
        """See Checkpointable.settle; it does nothing, because no step is asynchronous."""


def digest_of(arrays: Sequence[Array]) -> str:
    """Return a hash of arrays, including their dtypes and shapes."""
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return sha.hexdigest()


def write_arrays(path: Path, arrays: Mapping[str, Sequence[Array]]) -> None:
    """Write named lists of arrays to a new .npz file."""
    flat = {f"{name}.{at}": _plain(array) for name, values in arrays.items() for at, array in enumerate(values)}
    with path.open("xb") as file:
        np.savez(file, **flat)  # type: ignore[arg-type]


def read_arrays(path: Path, like: Mapping[str, Sequence[Array]]) -> dict[str, list[Array]]:
    """Read a file of write_arrays(). like: arrays with the names, dtypes and shapes that the file must have.

    Raises ValueError, before it allocates memory for data, for a file that differs from `like` or is no .npz file.
    """
    arrays = {f"{name}.{at}": array for name, values in like.items() for at, array in enumerate(values)}
    try:
        with open_regular(path) as opened:
            check_archive(opened, path.name)
            with zipfile.ZipFile(opened) as archive:
                present = {name.removesuffix(".npy") for name in archive.namelist()}
                if different := sorted(arrays.keys() ^ present):
                    raise ValueError(f"{path.name} and this job have different entries: {', '.join(different[:3])}")
                for name, array in arrays.items():  # all headers before any data
                    _check_header(archive, name, array)
                return {
                    name: [_read_array(archive, f"{name}.{at}", array) for at, array in enumerate(values)]
                    for name, values in like.items()
                }
    except (zipfile.BadZipFile, RuntimeError, EOFError) as error:  # RuntimeError: encrypted, or another version of zip
        raise ValueError(f"{path.name} cannot be read: {error}") from error


def _plain(array: Array) -> Array:
    """Return the same bits in one of numpy's own dtypes."""
    return array if array.dtype.kind in "biufc" else array.view(f"u{array.dtype.itemsize}")


def _check_header(archive: zipfile.ZipFile, name: str, like: Array) -> None:
    """Raise ValueError if the header of an entry has another dtype or shape, before memory is allocated for it."""
    with archive.open(f"{name}.npy") as file:
        try:
            version = np.lib.format.read_magic(file)
            if version != (1, 0):  # the version that numpy writes for every plain dtype
                raise ValueError(f"its .npy version is {version}")
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        except ValueError as error:
            raise ValueError(f"{name} cannot be read: {error}") from error
    if shape != like.shape or dtype != _plain(like).dtype:
        raise ValueError(
            f"{name} is {dtype} {shape} in the checkpoint, but {_plain(like).dtype} {like.shape} in this job"
        )


def _read_array(archive: zipfile.ZipFile, name: str, like: Array) -> Array:
    with archive.open(f"{name}.npy") as file:
        try:
            array: Array = np.lib.format.read_array(file, allow_pickle=False)
        except ValueError as error:
            raise ValueError(f"{name} cannot be read: {error}") from error
    return array.view(like.dtype)
