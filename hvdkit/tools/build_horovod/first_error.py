"""Find the first error in the output of a build: the one that the thousand lines after it follow from."""

from __future__ import annotations

import re
from collections.abc import Sequence

_MOST_LINES = 8
_KILLED = re.compile(r"fatal error: Killed signal|internal compiler error: Killed|virtual memory exhausted")
# The first kind that occurs anywhere is taken: what the compiler, CMake or the linker says goes before what follows.
_KINDS = (
    (
        re.compile(r"^\S[^:]*:\d+(:\d+)?: (fatal )?error:"),  # gcc, clang
        re.compile(r"^\S+\(\d+\): (catastrophic )?error"),  # nvcc
        re.compile(r"^CMake Error"),
        re.compile(r"(^|/)ld(\.\w+)?: (cannot find|error)|undefined reference to"),
        re.compile(r"^(\S+: )?fatal error:"),  # the driver: nothing to compile with, or killed
        _KILLED,
    ),
    (
        re.compile(r"^[A-Z]\w*(Error|Exception): "),  # Python, in setup.py
        re.compile(r"^(g?make|ninja)(\[\d+\])?: \*\*\*"),
        re.compile(r"^ERROR: |^error: "),  # pip and setuptools
    ),
)
_CODE = re.compile(r"^\s*\d*\s*\|")  # gcc shows the line and a caret below


def find_first_error(log: str) -> str:
    """Find the first error in a log, with the lines that belong to it; "" if none is recognised."""
    lines = [line.rstrip() for line in log.splitlines()]
    bare = [line.strip() for line in lines]  # pip indents what the build prints
    for kind in _KINDS:
        for number, line in enumerate(bare):
            if any(pattern.search(line) for pattern in kind):
                return "\n".join([line, *_following(lines, number)])
    return ""


def suggest(error: str) -> str:
    """Suggest what to do about an error; "" if it speaks for itself."""
    if _KILLED.search(error):
        return "The compiler ran out of memory: try again with --jobs 1."
    return ""


def _following(lines: Sequence[str], number: int) -> list[str]:
    """The lines below an error that belong to it: CMake's are indented and come after a blank, gcc's show code."""
    cmake = lines[number].strip().startswith("CMake Error")
    depth = _depth(lines[number])
    taken: list[str] = []
    for line in lines[number + 1 : number + 1 + _MOST_LINES]:
        if cmake and not line.strip():
            continue
        if not (_depth(line) > depth if cmake else _CODE.match(line)):
            break
        taken.append(line[depth:])
    return taken


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())
