"""Modules that stand where a script expects names, and have them from elsewhere."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def public_names_of(package: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a module that has the public names of a package, looked up when they are used."""

    def find(name: str) -> Any:
        module = importlib.import_module(package)
        if name == "__all__":
            return module.__all__
        if name not in module.__all__:
            raise AttributeError(f"{package} has no public name {name!r}")
        return getattr(module, name)

    return find
