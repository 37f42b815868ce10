"""Suggest the name that a misspelt one may stand for."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(name: str, names: Iterable[str], similarity: float = 0.7) -> str:
    """Write the question ` Did you mean NAME?` for the most similar name; "" if no name is similar.

    similarity: the least ratio of equal characters, from 0 to 1.
    """
    from difflib import get_close_matches  # takes 7 ms to import

    similar = get_close_matches(name, sorted(set(names) - {name}), 1, similarity)
    return f" Did you mean {similar[0]}?" if similar else ""
