"""Selection of modules by patterns of their names, such as "layers.*.query"; an asterisk matches within one name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from hvdkit.errors import ParallelError

_SHOWN = 12


def matches(pattern: str, name: str) -> bool:
    """Return whether the pattern matches this module's name; both have the same number of names between dots."""
    parts, names = pattern.split("."), name.split(".")
    return len(parts) == len(names) and all(map(fnmatchcase, names, parts))


def select(call: str, patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the names that a pattern matches, in their own order. call: the user's call, for messages.

    Raises ParallelError for a pattern that matches none.
    """
    known = list(names)
    for pattern in patterns:
        if not any(matches(pattern, name) for name in known):
            near = difflib.get_close_matches(pattern, known, 3, 0.5)
            hint = f" Similar names: {', '.join(near)}." if near else ""
            raise ParallelError(
                f"{call}: the pattern {pattern!r} names no module of the model.{hint} The model has "
                f"{', '.join(known[:_SHOWN])}{', ...' if len(known) > _SHOWN else ''}. Use names of "
                "model.named_modules(), with * for part of a name between dots."
            )
    return [name for name in known if any(matches(pattern, name) for pattern in patterns)]
