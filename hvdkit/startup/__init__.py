"""What ranks do before the script's first framework: `hvdrun --alias-horovod` and the like, with no line in the script.

hvdrun puts the folder `site` in front of PYTHONPATH. Python imports `sitecustomize` from there when it starts, and that
calls begin() at the first import of a framework or of Horovod. A process that imports neither is left as it is, but for
a finder that never finds anything. A Python that is told to ignore PYTHONPATH (-I, -E) or site (-S) is not reached.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

SITE = str(Path(__file__).with_name("site"))

#: Variable -> the module whose import does what it asks for, in this order.
MODULES = {
    "HVDKIT_ALIAS_HOROVOD": "hvdkit.alias_horovod",
    "HVDKIT_MPI_BACKEND": "hvdkit.aliasing.torch_mpi",
    "HVDKIT_WRAP": "hvdkit.wrap",
    "HVDKIT_COMPARE": "hvdkit.tools.compare.recorder.start",  # last: what it sees is what the script sees
}


def plan_variables(asked: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that make ranks begin with what is asked for.

    asked: names out of MODULES with their values. environ: that ranks would have without them. {} for nothing asked.
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
    """The modules to import, in their order."""
    return [module for name, module in MODULES.items() if environ.get(name, "") not in ("", "0")]


def begin(environ: Mapping[str, str] | None = None) -> None:
    """Import what the environment asks for."""
    for module in modules_asked_for(os.environ if environ is None else environ):
        importlib.import_module(module)
