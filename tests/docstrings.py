"""What `help(hvd.call)` has to tell: every public function says what it takes and what it raises."""

from __future__ import annotations

import inspect
from types import ModuleType

#: They take nothing and cannot fail.
_HARMLESS = ("is_initialized", "gpu_available", "_built", "_enabled")


def functions_of(hvd: ModuleType) -> list[str]:
    """The names of an adapter's public functions."""
    return sorted(name for name in hvd.__all__ if inspect.isroutine(getattr(hvd, name)))


def check_docstring(hvd: ModuleType, name: str) -> None:
    """Assert that the function of this name says what it has to."""
    function = getattr(hvd, name)
    told = inspect.getdoc(function) or ""
    assert told.partition("\n")[0].rstrip().endswith((".", "?", ":")), f"{name}: the first line is a sentence"
    if not name.endswith(_HARMLESS):
        assert "Error" in told or "raise" in told, name
    parameters = inspect.signature(function).parameters
    if {"tensor", "tensors"} & set(parameters):
        assert "shape" in told.lower() or "(n, ...)" in told, name
        assert "dtype" in told.lower(), name
