"""A scheduler: its commands, and how their output is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from hvdkit.tools.submit.job import BatchJob


@dataclass(frozen=True)
class State:
    """The state of a job.

    phase: waiting, running or ended.
    text: the scheduler's own word.
    code: exit code of an ended job; None if the scheduler does not report it.
    """

    phase: str
    text: str
    code: int | None = None


@dataclass(frozen=True)
class Scheduler:
    """A scheduler's commands.

    title: its name in prose. submit: the command line, which takes a script from standard input.
    read_id: reads the job's id from the output of `submit`; "" without one.
    ask: makes the command line that prints a job's state; read_state reads its output, None if the job is missing.
    cancel: makes the command line that ends a job.
    read_log: makes the command line that follows the log, where the log is not a file.
    """

    title: str
    write: Callable[[BatchJob], str]
    submit: tuple[str, ...]
    read_id: Callable[[str], str]
    ask: Callable[[str], tuple[str, ...]]
    read_state: Callable[[str], State | None]
    cancel: Callable[[str], tuple[str, ...]]
    read_log: Callable[[str], tuple[str, ...]] | None = None


def first_match(pattern: str) -> Callable[[str], str]:
    """Make a function that returns the first group of a pattern in a text; "" without a match."""

    def find(text: str) -> str:
        found = re.search(pattern, text)
        return found.group(1) if found else ""

    return find
