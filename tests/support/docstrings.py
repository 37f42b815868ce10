"""What `help(hvd.call)` must state: the shape and dtype of tensors, and the errors that the function raises."""

from __future__ import annotations

import inspect
from types import ModuleType

#: They take nothing and cannot fail.
_HARMLESS = ("is_initialized", "gpu_available", "_built", "_enabled")


def functions_of(hvd: ModuleType) -> list[str]:
    """The names of an adapter's public functions."""
    return sorted(name for name in hvd.__all__ if inspect.isroutine(getattr(hvd, name)))


def docstring_faults(hvd: ModuleType, name: str) -> list[str]:
    """What the docstring of this function lacks."""
    function = getattr(hvd, name)
    text = inspect.getdoc(function) or ""
    parameters = inspect.signature(function).parameters
    needed = {"a first line that is a sentence": text.partition("\n")[0].rstrip().endswith((".", "?", ":"))}
    if not name.endswith(_HARMLESS):
        needed["the errors that it raises"] = "Error" in text or "raise" in text
    if {"tensor", "tensors"} & set(parameters):
        needed["the tensor's shape"] = "shape" in text.lower() or "(n, ...)" in text
        needed["the tensor's dtype"] = "dtype" in text.lower()
    return [f"{name}() lacks {part}" for part, present in needed.items() if not present]
