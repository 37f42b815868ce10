"""Read the log of a build: how far it is, and its first error, from which the thousand lines after it follow."""

from __future__ import annotations

import re

_PERCENT = re.compile(r"\[\s*(\d{1,3})%\] ")
_MOST_LINES = 8
_KILLED = re.compile(r"fatal error: Killed signal|internal compiler error: Killed|virtual memory exhausted")
# The first kind that occurs anywhere counts: errors of compiler, CMake and linker before those that they cause.
_KINDS = (
    re.compile(
        r"^\S[^:]*:\d+(:\d+)?: (fatal )?error:"  # gcc, clang
        r"|^\S+\(\d+\): (catastrophic )?error"  # nvcc
        r"|^CMake Error"
        r"|(^|/)ld(\.\w+)?: (cannot find|error)|undefined reference to"
        r"|^(\S+: )?fatal error:"  # the driver: nothing to compile with, or killed
        rf"|{_KILLED.pattern}"
    ),
    re.compile(
        r"^[A-Z]\w*(Error|Exception): "  # Python, in setup.py
        r"|^(g?make|ninja)(\[\d+\])?: \*\*\*"
        r"|^ERROR: |^error: "  # pip and setuptools
    ),
)
_CODE = re.compile(r"^\s*\d*\s*\|")  # gcc shows the line and a caret below


def find_percent(log: str) -> int:
    """Find the last percentage that make printed; 0 if there is none."""
    return int((_PERCENT.findall(log) or [0])[-1])


def describe_failure(log: str) -> str:
    """Describe the first error of a failed build, and what to do about it."""
    error = find_first_error(log)
    cure = "\nThe compiler ran out of memory: try again with --jobs 1." if _KILLED.search(error) else ""
    return f"The first error:\n{error}{cure}" if error else "No line of its output is a recognised error."


def find_first_error(log: str) -> str:
    """Find the first error, with the lines that belong to it; "" if none is recognised."""
    lines = [line.rstrip() for line in log.splitlines()]
    for kind in _KINDS:
        for number, line in enumerate(lines):
            if kind.search(line.strip()):  # pip indents what the build prints
                return "\n".join([line.strip(), *_following(lines, number)])
    return ""


def _following(lines: list[str], number: int) -> list[str]:
    """The lines below an error that belong to it: CMake's are indented and come after a blank, gcc's show code."""
    is_cmake = lines[number].strip().startswith("CMake Error")
    depth = _depth(lines[number])
    following: list[str] = []
    for line in lines[number + 1 : number + 1 + _MOST_LINES]:
        if is_cmake and not line.strip():
            continue
        if not (_depth(line) > depth if is_cmake else _CODE.match(line)):
            break
        following.append(line[depth:])
    return following


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())
