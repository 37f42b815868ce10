"""Run a check of keras_training.py or keras_loops.py on ranks whose Keras has the wished backend."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import pytest
from ranks import run_ranks

PACKAGES = {"tensorflow": "tensorflow", "torch": "torch", "jax": "jax"}

each_backend = pytest.mark.parametrize("backend", sorted(PACKAGES))
#: Three ranks on TensorFlow, where test_tensorflow_training.py needs them anyway; on the others the two that are there.
each_backend_once_on_three = pytest.mark.parametrize(("backend", "size"), [("jax", 2), ("tensorflow", 3), ("torch", 2)])


def run_check(
    size: int,
    backend: str,
    check: str,
    *args: Any,
    timeout: float = 100,
    fresh: bool = False,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call `check`, "file:function", on ranks. This process itself does not import Keras, which has one backend.

    timeout, fresh, env: see run_ranks().
    """
    for package in ("keras", PACKAGES[backend]):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return run_ranks(size, _call, check, args, kwargs, backend=backend, timeout=timeout, fresh=fresh, env=env)


def _call(check: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    file, _, function = check.partition(":")
    return getattr(importlib.import_module(file), function)(*args, **kwargs)
