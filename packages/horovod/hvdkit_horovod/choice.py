"""The choice of the binding of the installed Horovod."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from hvdkit.alias import real_horovod
from hvdkit.errors import MissingDependencyError

_LIBRARIES = {"torch": "mpi_lib_v2", "tensorflow": "mpi_lib"}
_NOT_BUILT = "Horovod is not installed, or was built for neither torch nor tensorflow"
#: The cure for a missing Horovod.
CURE = (
    "Run `hvdkit build-horovod` to build Horovod for the installed frameworks, or use the native engine "
    "(HVDKIT_ENGINE=native)."
)


def judge_offer(built: Sequence[str], framework: str) -> tuple[bool, str]:
    """Decide whether ranks of `horovodrun --gloo` use Horovod's core; returns the reason too.

    built: frameworks for which the installed Horovod was built. framework: the script's; "" for none in particular.
    """
    if built and (not framework or framework in built):
        return True, "the ranks were started by horovodrun --gloo"
    what = f"the installed Horovod has no binding for {framework}" if built else _NOT_BUILT
    return False, f"the ranks were started by horovodrun, but {what}"


def built_bindings() -> list[str]:
    """List the frameworks for which the installed Horovod was built; nothing is loaded."""
    with real_horovod():
        spec = importlib.util.find_spec("horovod")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    return [
        framework
        for framework, library in _LIBRARIES.items()
        if any(any((folder / framework).glob(f"{library}*.so")) for folder in folders)
    ]


def choose_binding(framework: str, built: Sequence[str]) -> str:
    """Choose the binding for scripts of a framework. framework: "" for a framework without a binding of its own.

    Raises MissingDependencyError if Horovod has no such binding.
    """
    if not built:
        raise MissingDependencyError(
            f"The engine is set to Horovod's core (HVDKIT_ENGINE=horovod), but {_NOT_BUILT}. {CURE}"
        )
    if framework and framework not in built:
        raise MissingDependencyError(
            f"The installed Horovod has a binding for {', '.join(built)} only, and this script needs one for "
            f"{framework}. {CURE}"
        )
    return framework or built[0]
