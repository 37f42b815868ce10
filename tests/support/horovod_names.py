"""Print the public names and parameters of Horovod's modules that hvdkit lacks, one a line; run as a script.

Horovod itself has to be installed. A class or function is public in a module if its name has no leading underscore and
it is Horovod's own, also where the module only imports it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

MODULES = """
torch torch.elastic torch.mpi_ops torch.compression torch.functions torch.optimizer torch.sync_batch_norm
tensorflow tensorflow.elastic tensorflow.compression tensorflow.functions tensorflow.keras tensorflow.keras.callbacks
tensorflow.keras.elastic tensorflow.data.compute_service tensorflow.data.compute_worker keras keras.callbacks
keras.elastic
common.util common.process_sets common.exceptions common.elastic
"""


def public_names(module: ModuleType) -> dict[str, Any]:
    """What the module has of Horovod's own, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and (getattr(value, "__module__", None) or "").startswith("horovod")
    }


def parameters(value: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a function, or of a class when it is called; none where Python does not know them."""
    try:
        found = dict(inspect.signature(value.__init__ if inspect.isclass(value) else value).parameters)
    except (TypeError, ValueError):
        return {}
    found.pop("self", None)
    return found


def differences(theirs: Any, ours: Any) -> Iterator[str]:
    """What a class or function of Horovod's has and ours lacks: `(parameter)` or `.member`."""
    have = parameters(ours)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in have.values()):
        for name, parameter in parameters(theirs).items():
            if name not in have and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                yield f"({name})"
    if inspect.isclass(theirs):
        yield from (f".{name}" for name in vars(theirs) if not name.startswith("_") and not hasattr(ours, name))


def lacking() -> Iterator[str]:
    """All that hvdkit lacks: `module.name`, `module.name(parameter)` or `module.name.member`."""
    for path in MODULES.split():
        ours = importlib.import_module(f"hvdkit.{path}")
        for name, value in public_names(importlib.import_module(f"horovod.{path}")).items():
            if not hasattr(ours, name):
                yield f"{path}.{name}"
            elif callable(value):
                yield from (f"{path}.{name}{part}" for part in differences(value, getattr(ours, name)))


if __name__ == "__main__":
    print("\n".join(lacking()))
