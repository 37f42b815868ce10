"""Runs code on ranks before the script imports a framework, for `hvdrun --alias-horovod` and similar options.

The script needs no extra line: hvdrun puts the folder `site` in front of PYTHONPATH. Python imports `sitecustomize`
from there when it starts, and that calls begin() at the first import of a framework or of Horovod. A process that
imports neither is unchanged, except for a finder that never finds anything. This does not work if Python ignores
PYTHONPATH (-I, -E) or site (-S).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from hvdkit.entry_points import describe_missing, find_entry_points
from hvdkit.errors import MissingDependencyError

SITE = str(Path(__file__).with_name("site"))

#: Group of entry points, `VARIABLE = module`: the modules that other packages have for variables of PACKAGES.
ENTRY_POINTS = "hvdkit.startup"

#: Variable -> the module whose import does what the variable requests, imported in this order; "" for the module of
#: another package.
MODULES = {
    "HVDKIT_ALIAS_HOROVOD": "hvdkit.alias_horovod",
    "HVDKIT_MPI_BACKEND": "hvdkit.aliasing.torch_mpi",
    "HVDKIT_WRAP": "",
    "HVDKIT_COMPARE": "hvdkit.tools.compare.recorder.start",  # last: it must see the same modules as the script
}
#: Variable -> the option of hvdrun that sets it, and the folder in packages/ of the package that has the module.
PACKAGES = {"HVDKIT_WRAP": ("--wrap", "wrap")}


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
    names = [name for name in MODULES if environ.get(name, "") not in ("", "0")]
    return [MODULES[name] or find_module(name) for name in names]


def find_module(variable: str) -> str:
    """Return the module of another package for a variable of PACKAGES. Raises MissingDependencyError without it."""
    entry = find_entry_points(ENTRY_POINTS).get(variable)
    if entry is None:
        option, folder = PACKAGES[variable]
        raise MissingDependencyError(describe_missing(option, folder, f" in this Python, {sys.executable}"))
    return entry.value


def begin(environ: Mapping[str, str] | None = None) -> None:
    """Import the modules that the environment requests."""
    for module in modules_asked_for(os.environ if environ is None else environ):
        importlib.import_module(module)
