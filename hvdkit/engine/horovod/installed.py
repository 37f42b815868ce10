"""The Horovod that is installed: which frameworks it was built for, and the binding of one of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from hvdkit.alias import real_horovod
from hvdkit.engine.horovod.binding import Binding
from hvdkit.errors import MissingDependencyError

_LIBRARIES = {"torch": "mpi_lib_v2", "tensorflow": "mpi_lib"}
_CURE = (
    "Run `hvdkit build-horovod`, which builds it against the frameworks installed here, or take hvdkit's own engine "
    "(HVDKIT_ENGINE=native)."
)


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


def choose_binding(framework: str, built: Sequence[str]) -> str:
    """The binding to use for scripts of a framework. framework: "" for one that Horovod has no binding for.

    Raises MissingDependencyError where there is none.
    """
    if not built:
        raise MissingDependencyError(
            f"The engine is to be Horovod's core (HVDKIT_ENGINE=horovod), and Horovod is not installed here, or was "
            f"built for neither torch nor tensorflow. {_CURE}"
        )
    if framework and framework not in built:
        raise MissingDependencyError(
            f"Horovod is installed here with a binding for {', '.join(built)}, and this script needs the one for "
            f"{framework}. {_CURE}"
        )
    return framework or built[0]


def open_binding(framework: str) -> Binding:
    """Load the binding for a framework; see choose_binding()."""
    name = choose_binding(framework, built_bindings())
    try:
        with real_horovod():
            if name == "torch":
                from hvdkit.engine.horovod.torch_binding import TorchBinding

                return TorchBinding()
            from hvdkit.engine.horovod.tensorflow_binding import TensorflowBinding

            return TensorflowBinding()
    except (ImportError, OSError) as error:
        raise MissingDependencyError(f"Horovod's binding for {name} cannot be loaded: {error}. {_CURE}") from error
