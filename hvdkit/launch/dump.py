"""What faulthandler writes of a process, as data."""

from __future__ import annotations

import re
from typing import NamedTuple

_HEAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-fA-F]+\b.*:$")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_STARTS = ("_bootstrap", "_bootstrap_inner")  # of every thread


class Frame(NamedTuple):
    """A call that has not returned. line: 0 if not known."""

    file: str
    line: int
    function: str


Stack = tuple[Frame, ...]


def parse_dump(text: str) -> list[Stack]:
    """The stack of each thread, the main thread's first, with the innermost call last.

    Lines that are none of faulthandler's are passed over, so that any text gives an answer. A thread without Python
    has the stack ().
    """
    stacks: list[list[Frame]] = []
    for line in text.splitlines():
        if _HEAD.match(line):
            stacks.append([])
        elif stacks and (match := _FRAME.match(line)):
            number = int(match[2]) if match[2].isdecimal() else 0
            stacks[-1].append(Frame(match[1], number, match[3]))
    for stack in stacks:
        while stack and stack[-1].function in _STARTS:
            del stack[-1]
    return [tuple(reversed(stack)) for stack in reversed(stacks)]  # the thread that began first comes last
