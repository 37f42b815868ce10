"""Every Python that starts with this folder on PYTHONPATH imports this module, even if hvdkit is not installed there.

It must work in any Python 3, take no noticeable time, and run the environment's own sitecustomize afterwards.
"""

import os
import sys
from importlib import import_module

_TRIGGERS = ("horovod", "torch", "tensorflow", "keras", "jax")
_VARIABLES = ("HVDKIT_ALIAS_HOROVOD", "HVDKIT_MPI_BACKEND", "HVDKIT_WRAP", "HVDKIT_COMPARE")


class _Beginning:
    """Calls hvdkit.startup.begin() before the first framework is imported, and removes itself from sys.meta_path."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """Find no modules of its own; see importlib.abc.MetaPathFinder."""
        if name not in _TRIGGERS:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        if _lone_rank is not None:
            _lone_rank.watch()
        if not any(map(_asked, _VARIABLES)):
            return None
        from importlib.util import find_spec

        try:
            from hvdkit.startup import begin
        except ImportError as error:
            if error.name != "hvdkit":
                raise
            if name != "horovod" and not _asked("HVDKIT_WRAP") and not _asked("HVDKIT_MPI_BACKEND"):
                return None
            raise ImportError(
                "hvdrun --alias-horovod, --wrap and --mpi-backend need hvdkit, which is not installed in this Python: "
                + sys.executable
                + ". Install hvdkit there, or start the script with a Python that has it.",
                name=name,
            ) from None
        begin()
        if name in sys.modules:
            raise ImportError("hvdkit imported " + name + " to prepare for that import. Please report this.")
        return find_spec(name)


def _asked(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


def _run_the_next_one() -> None:
    """Run the next sitecustomize on sys.path, which this module hides, if one exists."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [place for place in sys.path if os.path.abspath(place) != here]
    if len(others) == len(sys.path):
        return  # this folder is not on sys.path: the module was imported by name from elsewhere
    sys.path[:] = others
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_lone_rank = import_module("hvdkit_lone_rank") if _asked("HVDKIT_LAUNCHER_CHANNEL") else None
if _lone_rank is not None or any(map(_asked, _VARIABLES)):
    sys.meta_path.insert(0, _Beginning())  # type: ignore[arg-type]
_run_the_next_one()
