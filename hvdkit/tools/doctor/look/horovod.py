"""Horovod as it is installed here: what was built, and whether it can be loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hvdkit.launch.environment import clean_environment
from hvdkit.tools.build_horovod.versions import find_package, find_version
from hvdkit.tools.doctor.facts import Horovod
from hvdkit.tools.doctor.probe import run_probe

_TIMEOUT_S = 60.0
#: Framework -> its library's name within Horovod's folder, and its name in metadata.json.
_BINDINGS = {"torch": ("torch/mpi_lib_v2*.so", "pytorch"), "tensorflow": ("tensorflow/mpi_lib*.so", "tensorflow")}


def read_horovod(environ: Mapping[str, str]) -> Horovod:
    """Look at the installed files, then load each binding in a process of its own: seconds, where there are any."""
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
