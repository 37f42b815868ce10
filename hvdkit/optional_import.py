"""Optional packages: import them where they are used, or say how to get them."""

from __future__ import annotations

import importlib
from types import ModuleType

from hvdkit.errors import MissingDependencyError


def optional_import(module: str, extra: str) -> ModuleType:
    """Import an optional package.

    extra: the extra of hvdkit that brings it.
    Raises MissingDependencyError if it is not installed; an installed but broken package shows its own error.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # there, but broken inside: its own message says more than ours
        raise MissingDependencyError(
            f"The package '{module}' is not installed. Run: pip install 'hvdkit[{extra}]', in a clone '.[{extra}]'"
        ) from None
