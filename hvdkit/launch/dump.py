"""What faulthandler writes of a process, as data."""

from __future__ import annotations

import re
from typing import NamedTuple

_HEAD = re.compile(r"(?:(Thread|Current thread) 0x[0-9a-fA-F]+\b.*|(Stack) \(most recent call first\)):$")
# A thread alone is the main one, which a signal has made write; else one thread writes all, itself as the current one.
_MAIN, _THREAD = "Stack", "Thread"
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

    text: of the main thread, or of all threads by one that does nothing else, which is left out; where both have
    answered it is all threads. Lines that are none of faulthandler's are passed over, so that any text gives an answer.
    A thread without Python has the stack ().
    """
    stacks: dict[str, list[list[Frame]]] = {}
    stack: list[Frame] = []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            stack = []
            stacks.setdefault(head[1] or head[2], []).append(stack)
        elif match := _FRAME.match(line):
            number = int(match[2]) if match[2].isdecimal() else 0
            stack.append(Frame(match[1], number, match[3]))
    found = stacks.get(_THREAD) or stacks.get(_MAIN) or []
    for stack in found:
        while stack and stack[-1].function in _STARTS:
            del stack[-1]
    return [tuple(reversed(stack)) for stack in reversed(found)]  # the thread that began first comes last
