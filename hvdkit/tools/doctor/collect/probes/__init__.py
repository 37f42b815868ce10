"""Programs that doctor runs by path, each in a process of its own; they print JSON objects, one a line.

Run by path, they see the same packages as a script would, and no module that lies about in the current folder. For the
same reason none of them bears the name of a package. What may crash, hang or take long is one of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdkit.launch.process import run_program

_PROBES = Path(__file__).parent
_ERROR = "error"


def run_probe(name: str, environ: Mapping[str, str], timeout_s: float, *arguments: str) -> dict[str, Any]:
    """Run a file of probes/ with this Python, and merge the JSON objects that it printed, a line each.

    Lines that it printed before it crashed or hung count too; "error" then describes its end.
    """
    result = run_program([sys.executable, find_probe(name), *arguments], environ=environ, timeout_s=timeout_s)
    answer: dict[str, Any] = {}
    for line in result.stdout.splitlines():
        answer.update(read_object(line))
    if result.status is None:
        answer[_ERROR] = result.ending
    elif result.status:
        answer.setdefault(_ERROR, f"{result.ending}{_last_line(result.stderr)}")
    return answer


def find_probe(name: str) -> str:
    """Build the path of a file of probes/."""
    return str(_PROBES / f"{name}.py")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return f": {lines[-1].strip()}" if lines else ""


def read_object(line: str) -> dict[str, Any]:
    """Read the JSON object in a line, which may begin with a rank's prefix; {} if there is none."""
    try:
        return dict(json.loads(line[line.index("{") : line.rindex("}") + 1]))
    except (ValueError, RecursionError):
        return {}
