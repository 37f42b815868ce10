"""The Horovod that is installed: its version, which frameworks it was built for, and importing it beside an alias."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from hvdkit.errors import MissingDependencyError

#: What hvdkit's alias (hvdkit.alias_horovod) is known by: an attribute of its module `horovod`, and of its finder.
_MARK = "hvdkit_alias"
_LIBRARIES = {"torch": "mpi_lib_v2", "tensorflow": "mpi_lib"}
CURE = (
    "Run `hvdkit build-horovod`, which builds it against the frameworks installed here, or take hvdkit's own engine "
    "(HVDKIT_ENGINE=native)."
)

_real: dict[str, ModuleType] = {}


@contextmanager
def real_horovod() -> Iterator[None]:
    """Within, `import horovod` gives the one that is installed; what is imported so stays the same next time.

    Nothing happens where the name is not hvdkit's. Other threads must not import horovod meanwhile.
    """
    finders = [finder for finder in sys.meta_path if getattr(finder, _MARK, False)]
    if not finders:
        yield
        return
    aliases = _remove_modules()
    sys.modules.update(_real)
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in finders]
    try:
        yield
    finally:
        _real.update(_remove_modules())
        sys.modules.update(aliases)
        sys.meta_path[:] = [*finders, *(finder for finder in sys.meta_path if finder not in finders)]


def _remove_modules() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == "horovod" or name.startswith("horovod.")]
    return {name: sys.modules.pop(name) for name in names}


def built_bindings() -> list[str]:
    """The frameworks that the Horovod which is installed here was built for; nothing is loaded."""
    with real_horovod():
        spec = importlib.util.find_spec("horovod")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    return [
        framework
        for framework, library in _LIBRARIES.items()
        if any(any((folder / framework).glob(f"{library}*.so")) for folder in folders)
    ]


def horovod_version() -> str:
    """The version of Horovod that is installed; "" for none."""
    try:
        return importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return ""


def choose_binding(framework: str, built: Sequence[str]) -> str:
    """The binding to use for scripts of a framework. framework: "" for one that Horovod has no binding for.

    Raises MissingDependencyError where there is none.
    """
    if not built:
        raise MissingDependencyError(
            f"The engine is to be Horovod's core (HVDKIT_ENGINE=horovod), and Horovod is not installed here, or was "
            f"built for neither torch nor tensorflow. {CURE}"
        )
    if framework and framework not in built:
        raise MissingDependencyError(
            f"Horovod is installed here with a binding for {', '.join(built)}, and this script needs the one for "
            f"{framework}. {CURE}"
        )
    return framework or built[0]
