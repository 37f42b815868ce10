"""Reading a list line by line: problems are collected, not raised, so that all are told together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hvdkit.launch.hosts.host import Host, merge_hosts
from hvdkit.launch.hosts.ranges import MOST_HOSTS

_ASSIGNMENT = re.compile(r"\s*(?:export\s+)?([A-Z_][A-Z0-9_]*)=(.*)", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class Reading:
    """What a text says in some dialect.

    hosts: each once; slots None where the text does not say.
    problems: (line, what is wrong and how to mend it), the line counted from 1; hosts cannot be used if there are any.
    notes: what was understood and is not used.
    """

    hosts: tuple[Host, ...]
    problems: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()


def content_lines(text: str) -> Iterator[tuple[int, str]]:
    """Give the lines that say something, with their numbers from 1: no comments (#), no blanks around."""
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        content = line.partition("#")[0].strip()
        if content:
            yield number, content


def read_lines(
    lines: Iterable[tuple[int, str]],
    parse: Callable[[str], Iterable[Host]],
    *,
    merge: Callable[[Iterable[Host]], tuple[Host, ...]] = merge_hosts,
    notes: Sequence[str] = (),
) -> Reading:
    """Read numbered lines with `parse`, which raises ValueError for one that cannot be.

    merge: makes one host of those that are named more than once; may raise ValueError.
    notes: a list that `parse` may fill while it is at work.
    """
    hosts: list[Host] = []
    problems: list[tuple[int, str]] = []
    for number, content in lines:
        try:
            hosts += parse(content)
        except ValueError as problem:
            problems.append((number, str(problem)))
        if len(hosts) > MOST_HOSTS:
            problems.append((number, f"there are more than {MOST_HOSTS} hosts up to here. Check the ranges before it"))
            return Reading((), tuple(problems))
    return Reading(merge(hosts), tuple(problems), tuple(dict.fromkeys(notes)))


def count_repeats(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Merge hosts where a line is a slot: if one is repeated, it is also said that those named once have one slot."""
    merged = merge_hosts(hosts)
    if any(host.slots is not None for host in merged):
        return tuple(replace(host, slots=host.slots or 1) for host in merged)
    return merged


def parse_assignment(line: str) -> tuple[str, str] | None:
    """Split NAME=value or export NAME="value" of a shell; None if the line is no such thing."""
    found = _ASSIGNMENT.fullmatch(line)
    if found is None:
        return None
    value = found[2].strip()
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    return found[1], value


def join_words(words: Iterable[str]) -> str:
    """Write a list for a sentence: a, b and c."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
