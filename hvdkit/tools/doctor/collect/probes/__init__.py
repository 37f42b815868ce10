"""Runs the probe programs, which print JSON objects, one a line.

They are run by path, so they see the same packages as a script would, and no module of the current folder. For the
same reason their file is alone in a folder, outside of any package's namespace.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdkit.launch.process import run_program

_PROGRAMS = Path(__file__).with_name("programs.py")
_ERROR = "error"


def run_probe(name: str, environ: Mapping[str, str], timeout_s: float, *arguments: str) -> dict[str, Any]:
    """Run a program with this Python, and merge the JSON objects that it printed, a line each.

    name: name of the function in programs.py.
    environ: its variables.
    timeout_s: time limit.
    arguments: its arguments.
    Lines that it printed before it crashed or hung count too; "error" then describes its end.
    """
    result = run_program(probe_argv(name, *arguments), environ=environ, timeout_s=timeout_s)
    answer: dict[str, Any] = {}
    for line in result.stdout.splitlines():
        answer.update(read_object(line))
    if result.status is None:
        answer[_ERROR] = result.ending
    elif result.status:
        answer.setdefault(_ERROR, f"{result.ending}{_last_line(result.stderr)}")
    return answer


def probe_argv(name: str, *arguments: str) -> list[str]:
    """Build the command line that runs a program with this Python."""
    return [sys.executable, str(_PROGRAMS), name, *arguments]


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return f": {lines[-1].strip()}" if lines else ""


def read_object(line: str) -> dict[str, Any]:
    """Read the JSON object in a line, which may begin with a rank's prefix; {} without an object."""
    try:
        return dict(json.loads(line[line.index("{") : line.rindex("}") + 1]))
    except (ValueError, RecursionError):
        return {}
