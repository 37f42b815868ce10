"""Imports optional packages where they are used, with an error that names the pip command if one is missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from hvdkit.errors import MissingDependencyError


def optional_import(module: str, extra: str = "", package: str = "hvdkit") -> ModuleType:
    """Import an optional package.

    extra: the extra that installs it; "" for the package itself.
    package: the distribution that has this extra.
    Raises MissingDependencyError if it is not installed; an installed but broken package shows its own error.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # installed but broken: its own message is more precise than ours
        name = module.partition(".")[0]
        what = f"'{package}[{extra}]', in a clone '{_folder(package)}[{extra}]'" if extra else name
        raise MissingDependencyError(f"The package '{module}' is not installed. Run: pip install {what}") from None


def _folder(package: str) -> str:
    """Return the folder of a distribution in a clone of hvdkit."""
    return "." if package == "hvdkit" else f"./packages/{package.removeprefix('hvdkit-')}"
