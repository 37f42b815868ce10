"""The settings of the installed packages: dataclasses that entry points of the group hvdkit.settings name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any

from hvdkit.config import read_config, read_package_config, read_settings
from hvdkit.entry_points import load_entry_points
from hvdkit.setting import Setting, Settings

#: Group of entry points, `PREFIX = module:Class`: a subclass of Settings with this prefix.
ENTRY_POINTS = "hvdkit.settings"


def find_package_settings() -> dict[str, type[Settings]]:
    """Load the settings of the installed packages, by prefix.

    Raises HvdkitError for a package that cannot be loaded, or whose settings have another prefix.
    """
    return load_entry_points(ENTRY_POINTS, (), _find_flaw)


def _find_flaw(prefix: str, kind: Any) -> str:
    right = isinstance(kind, type) and issubclass(kind, Settings) and is_dataclass(kind) and kind.prefix == prefix
    flags = [each.flag for each in read_settings({}, kind) if each.flag] if right else []
    if right and all(flag.startswith(f"--{prefix}-") for flag in flags):
        return ""
    return f"is not a dataclass of settings with the prefix {prefix} and options that begin with --{prefix}-"


def read_all_settings(environ: Mapping[str, str] | None = None) -> list[Setting]:
    """Read every setting of hvdkit and of the installed packages, with the origin of its value.

    environ: environment variables; None reads os.environ.
    Raises ConfigError for variables with an invalid value, HvdkitError as find_package_settings() does.
    """
    packages = find_package_settings().values()
    return [*read_settings(environ), *(each for kind in packages for each in read_settings(environ, kind))]


def check_settings(environ: Mapping[str, str], packages: Iterable[type[Settings]]) -> None:
    """Raise ConfigError for a setting of hvdkit, or of these packages, with an invalid value.

    environ: environment variables.
    """
    read_config(environ)
    for kind in packages:
        read_package_config(kind, environ)
