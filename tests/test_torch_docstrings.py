"""What `help(hvd.call)` tells: every public function says what it takes and what it raises."""

from __future__ import annotations

import inspect

import pytest

import hvdkit.torch as hvd

FUNCTIONS = sorted(name for name in hvd.__all__ if inspect.isfunction(getattr(hvd, name)))
#: They take nothing and cannot fail.
HARMLESS = {"is_initialized", *(name for name in FUNCTIONS if name.endswith(("_built", "_enabled")))}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_says_what_it_takes_and_raises(name: str) -> None:
    function = getattr(hvd, name)
    told = inspect.getdoc(function) or ""
    assert told.partition("\n")[0].rstrip().endswith((".", "?", ":")), "the first line is a sentence"
    if name not in HARMLESS:
        assert "Error" in told or "raise" in told
    parameters = inspect.signature(function).parameters
    if {"tensor", "tensors"} & set(parameters):
        assert "shape" in told.lower() or "(n, ...)" in told
        assert "dtype" in told.lower()
