"""Finds what other packages add to hvdkit, by the entry points of their distributions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from hvdkit.errors import HvdkitError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def find_entry_points(group: str) -> dict[str, EntryPoint]:
    """Find the entry points of a group in the installed distributions, by name, in the order of the names.

    The first call takes some 40 ms, three quarters of it to import importlib.metadata; later calls take none.
    Raises HvdkitError if two packages have an entry point of the same name.
    """
    found: dict[str, EntryPoint] = {}
    for entry in sorted(_scan(tuple(sys.path)).select(group=group)):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise HvdkitError(
                f"the packages {name_package(other)} and {name_package(entry)} both have the entry point {entry.name} "
                f"of {group}. Remove one of them."
            )
    return found


@functools.lru_cache(1)
def _scan(path: tuple[str, ...]) -> Any:
    """Read the entry points of all distributions on sys.path."""
    from importlib.metadata import entry_points

    return entry_points()


def load_entry_point(entry: EntryPoint) -> Any:
    """Load the object that an entry point names. Raises HvdkitError with the package if that fails."""
    try:
        return entry.load()
    except (Exception, SystemExit) as error:  # whatever a package raises at its import
        raise _unusable(entry, describe_error(error)) from error


def load_checked(entry: EntryPoint, own: Collection[str], find_flaw: Callable[[str, Any], str]) -> Any:
    """Load the object that an entry point names, and check it.

    own: hvdkit's names of such objects, which a package cannot replace.
    find_flaw: takes the name and the object; returns how it is wrong, as "is not a Scheduler", "" if it is right.
    Raises HvdkitError with the package if it cannot be loaded, or if its object is wrong.
    """
    loaded = load_entry_point(entry)
    flaw = find_flaw(entry.name, loaded) or ("has the name of one of hvdkit's" if entry.name in own else "")
    if flaw:
        raise _unusable(entry, f"{entry.value} {flaw}")
    return loaded


def _unusable(entry: EntryPoint, why: str) -> HvdkitError:
    return HvdkitError(
        f"the package {name_package(entry)} cannot be loaded: {why} (entry point {entry.name} of {entry.group}). "
        "Update or remove this package."
    )


def load_entry_points(group: str, own: Collection[str], find_flaw: Callable[[str, Any], str]) -> dict[str, Any]:
    """Load and check the objects of a group, by name, in the order of the names. See load_checked()."""
    return {name: load_checked(entry, own, find_flaw) for name, entry in find_entry_points(group).items()}


def describe_error(error: BaseException) -> str:
    """Describe a package's error in one line, whatever its text contains."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def name_package(entry: EntryPoint) -> str:
    """Return the name of the distribution that has an entry point; that of its object if it is unknown."""
    return entry.dist.name if entry.dist is not None else entry.value


def describe_missing(what: str, folder: str, where: str = "") -> str:
    """Write the error for what is in a package that is not installed, with the command that installs it.

    what: the subject of the sentence.
    folder: of the package in packages/; its distribution is hvdkit-FOLDER.
    where: of the installation; "" for the Python that runs.
    """
    return (
        f"{what} is in the package hvdkit-{folder}, which is not installed{where}. Run, in a clone of hvdkit: "
        f"pip install -c constraints.txt ./packages/{folder}"
    )
