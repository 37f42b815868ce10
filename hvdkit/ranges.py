"""Parses numbers written as ranges or with repeats: "0-3,8", "2(x3),1". The agent loads this file too."""

from __future__ import annotations

import re

_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,5})\))?", re.ASCII)


class TooManyNumbersError(ValueError):
    """The text has more numbers than the limit."""


def split_range(item: str) -> tuple[str, str]:
    """Split "001-004" into its first and last number, as written. Raises ValueError for other text."""
    found = _RANGE.fullmatch(item)
    if found is None:
        raise ValueError(f"{item[:100]!r} is not a number or a range of numbers like 0-3")
    return found[1], found[2] or found[1]


def read_ranges(text: str, most: int = 10**6) -> list[int]:
    """Parse numbers and ranges like "0-3,8", in their order.

    most: the largest number of numbers. Raises ValueError, which names the item, for any other form and for descending
    ranges.
    """
    numbers: list[int] = []
    for item in text.split(","):
        first, last = map(int, split_range(item))
        if last < first:
            raise ValueError(f"the range {item} is descending; write the smaller number first")
        if last - first >= most - len(numbers):
            raise TooManyNumbersError(f"{text[:100]!r} has more than {most} numbers")
        numbers += range(first, last + 1)
    return numbers


def read_counts(text: str, most: int = 10**6) -> list[int]:
    """Parse Slurm's counts: "2(x3),1" is three nodes with two tasks each, then one node with one task.

    most: the largest number of nodes. Raises ValueError for any other form.
    """
    counts: list[int] = []
    for item in filter(None, text.split(",")):
        found = _COUNT.fullmatch(item)
        if found is None:
            raise ValueError(f"{item[:100]!r} is not a count like 2 or 2(x3)")
        counts += [int(found[1])] * int(found[2] or 1)
        if len(counts) > most:
            raise TooManyNumbersError(f"{text[:100]!r} has more than {most} counts")
    return counts
