"""The settings of the installed packages: dataclasses that entry points of the group hvdkit.settings name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass

from hvdkit.config import read_config, read_package_config, read_settings
from hvdkit.entry_points import find_entry_points, load_entry_point, name_package
from hvdkit.errors import HvdkitError
from hvdkit.setting import Setting, Settings

#: Group of entry points, `PREFIX = module:Class`: a subclass of Settings with this prefix.
ENTRY_POINTS = "hvdkit.settings"


def find_package_settings() -> dict[str, type[Settings]]:
    """Load the settings of the installed packages, by prefix.

    Raises HvdkitError for a package that cannot be loaded, or whose settings have another prefix.
    """
    found: dict[str, type[Settings]] = {}
    for prefix, entry in find_entry_points(ENTRY_POINTS).items():
        kind = load_entry_point(entry)
        right = isinstance(kind, type) and issubclass(kind, Settings) and is_dataclass(kind) and kind.prefix == prefix
        flags = [each.flag for each in read_settings({}, kind) if each.flag] if right else []
        if not right or not all(flag.startswith(f"--{prefix}-") for flag in flags):
            raise HvdkitError(
                f"the package {name_package(entry)} cannot be loaded: {entry.value} is not a dataclass of settings "
                f"with the prefix {prefix} and options that begin with --{prefix}-. Update or remove this package."
            )
        found[prefix] = kind
    return found


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
