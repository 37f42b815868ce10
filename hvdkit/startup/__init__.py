"""Runs code on ranks before the script imports a framework, for `hvdrun --alias-horovod` and similar options.

The script needs no extra line: hvdrun puts the folder `site` in front of PYTHONPATH. Python imports `sitecustomize`
from there when it starts, and that calls begin() at the first import of a framework or of Horovod. A process that
imports neither is unchanged, except for a finder that never finds anything. This does not work if Python ignores
PYTHONPATH (-I, -E) or site (-S).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

SITE = str(Path(__file__).with_name("site"))

#: Variable -> the module whose import does what the variable requests; imported in this order.
MODULES = {
    "HVDKIT_ALIAS_HOROVOD": "hvdkit.alias_horovod",
    "HVDKIT_MPI_BACKEND": "hvdkit.aliasing.torch_mpi",
    "HVDKIT_WRAP": "hvdkit_wrap",
    "HVDKIT_COMPARE": "hvdkit.tools.compare.recorder.start",  # last: it must see the same modules as the script
}


def plan_variables(asked: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make ranks import the requested modules; {} if nothing is requested.

    asked: names from MODULES with their values. environ: the environment that the ranks would have without them.
    """
    if not asked:
        return {}
    unknown = [name for name in asked if name not in MODULES]
    if unknown:
        raise ValueError(f"unknown variables {', '.join(unknown)}; use {', '.join(MODULES)}")
    path = environ.get("PYTHONPATH")
    before = [place for place in path.split(os.pathsep) if place != SITE] if path else []  # "": the working directory
    return {**asked, "PYTHONPATH": os.pathsep.join([SITE, *before])}


def modules_asked_for(environ: Mapping[str, str]) -> Iterable[str]:
    """Return the modules that the variables request, in the order of MODULES."""
    return [module for name, module in MODULES.items() if environ.get(name, "") not in ("", "0")]


def begin(environ: Mapping[str, str] | None = None) -> None:
    """Import the modules that the environment requests."""
    for module in modules_asked_for(os.environ if environ is None else environ):
        importlib.import_module(module)
