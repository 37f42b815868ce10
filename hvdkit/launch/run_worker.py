"""`python -m hvdkit.launch.run_worker FOLDER`: a rank of hvdkit.run(). Calls the function and leaves its result."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path

from hvdkit.launch.run_api import FUNCTION, result_name
from hvdkit.world import read_world


def main(folder: Path) -> None:
    """Load the function, call it and write what it returns."""
    pickler = importlib.import_module("cloudpickle")
    data = (folder / FUNCTION).read_bytes()
    func, args, kwargs, path = pickle.loads(data)
    sys.path += [place for place in path if place not in sys.path]
    (folder / result_name(read_world().rank)).write_bytes(pickler.dumps(func(*args, **kwargs)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
