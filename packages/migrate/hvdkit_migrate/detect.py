"""Detects the library that a script is written for."""

from __future__ import annotations

import libcst as cst

from hvdkit_migrate.script import Script, last

#: The values of --from, with their meanings.
KINDS = {
    "horovod": "a script for Horovod",
    "ddp": "PyTorch with torch.distributed and DistributedDataParallel",
    "torch": "PyTorch for one process",
    "keras": "Keras for one process",
    "hvdkit": "a script for hvdkit",
}


def detect(script: Script) -> str:
    """Return the kind of a script, from its imports; "" if it is of no known kind."""
    if script.imports_from("horovod"):
        return "horovod"
    if script.imports_from("hvdkit"):
        return "hvdkit"
    if _is_ddp(script):
        return "ddp"
    keras = script.imports_from("keras", "tensorflow")
    torch = script.imports_from("torch")
    if keras and torch:
        return "torch" if any(last(call) == "backward" for call in script.all(cst.Call)) else "keras"
    if torch or keras:
        return "torch" if torch else "keras"
    return ""


def _is_ddp(script: Script) -> bool:
    names = {name for call in script.all(cst.Call) for name in script.names.possible(call)}
    return any(
        name.startswith("torch.distributed.") or name.endswith(("DistributedDataParallel", "data.DistributedSampler"))
        for name in names
    )


def is_for_keras(script: Script) -> bool:
    """Does a script for Horovod or hvdkit train with Keras?"""
    return script.imports_from("keras", "tensorflow.keras") or any(
        name.startswith(("horovod.keras", "horovod.tensorflow.keras", "hvdkit.keras", "tensorflow"))
        for name in script.names.modules
    )
