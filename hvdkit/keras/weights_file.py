"""Check of an untrusted weights file before Keras reads it."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from hvdkit.checkpoint.files import open_regular


def check_weights_file(path: Path) -> None:
    """Raise ValueError if an HDF5 file refers to other files, or if its arrays are larger than the file.

    Files that Keras has saved pass: their arrays are not compressed. Raises what h5py raises for a damaged file.
    """
    h5py = importlib.import_module("h5py")
    total = 0

    def add(name: str, link: Any) -> str | None:  # a result ends the visit; h5py would replace an exception
        nonlocal total
        if not isinstance(link, h5py.HardLink):
            return f"{name} is a {type(link).__name__}, which no checkpoint of hvdkit has"
        entry = content[name]
        if isinstance(entry, h5py.Dataset):
            if entry.external or entry.is_virtual:
                return f"the data of {name} is in another file, which no checkpoint of hvdkit has"
            total += entry.nbytes
        return None

    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
    with h5py.File(path, "r") as content:
        problem = content.visititems_links(add)
    if total > size:
        problem = problem or f"it has {size} bytes, but its arrays {total} bytes"
    if problem:
        raise ValueError(f"{path.name}: {problem}")
