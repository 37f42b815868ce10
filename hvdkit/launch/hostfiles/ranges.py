"""Ranges of host names, as Slurm writes them: nid[001-004,007],login1.

A list, not a set: ranks follow its order, and SLURM_TASKS_PER_NODE counts along it. ClusterShell's node sets are sorted
and without repetition, so they cannot replace this; the tests compare with them where both mean the same.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

#: More hosts than Slurm can have in a job: a limit for ranges with a typing error.
MOST_HOSTS = 65536

_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)
_NUMBERED = re.compile(r"(.*?)([0-9]{1,18})", re.ASCII | re.DOTALL)


def split_list(text: str) -> list[str]:
    """Split at the commas outside of brackets: "a[1,2],b" is "a[1,2]" and "b"."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth <= 0:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]


def expand(text: str) -> list[str]:
    """Expand a name with any number of ranges in brackets.

    Leading zeros are kept: n[08-10] is n08, n09, n10. Raises ValueError for invalid brackets.
    """
    if "[" not in text and "]" not in text:
        return [text]
    parts = re.split(r"\[([^][]*)\]", text)
    if any("[" in part or "]" in part for part in parts):
        raise ValueError(f"{text!r} has unbalanced brackets. Write ranges like nid[001-004,007]")
    choices: list[list[str]] = []
    count = 1
    for number, part in enumerate(parts):
        # One more than allowed proves that there are too many.
        found = list(itertools.islice(_expand_range(part, text), MOST_HOSTS + 1)) if number % 2 else [part]
        choices.append(found)
        count *= len(found)
        if count > MOST_HOSTS:
            raise ValueError(f"{text[:100]!r} expands to more than {MOST_HOSTS} hosts. Check the numbers in it")
    return ["".join(each) for each in itertools.product(*choices)]


def fold(names: Iterable[str]) -> str:
    """Write names with consecutive numbers as ranges, in their order: the inverse of `split_list` and `expand`."""
    groups: list[tuple[str, list[list[str]]]] = []
    for name in names:
        numbered = _NUMBERED.fullmatch(name)
        prefix, digits = numbered.groups() if numbered else (name, "")
        if digits and groups and groups[-1][0] == prefix and groups[-1][1]:
            runs = groups[-1][1]
            if digits == str(int(runs[-1][-1]) + 1).zfill(len(runs[-1][0])):
                runs[-1][1:] = [digits]
            else:
                runs.append([digits])
        else:
            groups.append((prefix, [[digits]] if digits else []))
    return ",".join(_write_group(prefix, runs) for prefix, runs in groups)


def _expand_range(inside: str, text: str) -> Iterator[str]:
    for item in inside.split(","):
        found = _RANGE.fullmatch(item)
        if found is None:
            raise ValueError(f"{item!r} in {text!r} is not a number or a range of numbers like 001-004")
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first):
            raise ValueError(f"the range {item} in {text!r} is descending. Write {last}-{first}")
        if last.startswith("0") and len(last) > len(first):
            padded = first.zfill(len(last))
            raise ValueError(
                f"the range {item} in {text!r} has different numbers of leading zeros. Write {padded}-{last}"
            )
        if int(last) - int(first) >= MOST_HOSTS:
            raise ValueError(f"{text!r} expands to more than {MOST_HOSTS} hosts. Check the numbers in it")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _write_group(prefix: str, runs: list[list[str]]) -> str:
    if not runs:
        return prefix
    if len(runs) == 1 and len(runs[0]) == 1:
        return prefix + runs[0][0]
    return f"{prefix}[{','.join('-'.join(run) for run in runs)}]"
