"""`python -m hvdkit.launch.called FOLDER`: a rank of hvdkit.run(). Calls the function and leaves its result there."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path

from hvdkit.launch.function import FUNCTION, result_name
from hvdkit.world import read_world


def main(folder: Path) -> None:
    """Load the function, call it and write what it returns."""
    pickler = importlib.import_module("cloudpickle")
    data = (folder / FUNCTION).read_bytes()
    func, args, kwargs, path = _load(data)
    sys.path += [place for place in path if place not in sys.path]
    (folder / result_name(read_world().rank)).write_bytes(pickler.dumps(func(*args, **kwargs)))


def _load(data: bytes) -> tuple:  # type: ignore[type-arg]
    loaded: tuple = pickle.loads(data)  # type: ignore[type-arg]
    return loaded


if __name__ == "__main__":
    main(Path(sys.argv[1]))
