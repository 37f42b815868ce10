"""Do in another process what may crash, hang or take long."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PROBES = Path(__file__).with_name("probes")
_ERROR = "error"


def run_probe(name: str, environ: Mapping[str, str], timeout_s: float, *arguments: str) -> dict[str, Any]:
    """Run a file of probes/ with this Python, and merge the JSON objects that it printed, a line each.

    What it printed before it crashed or hung counts too; then "error" says how it ended.
    """
    status, out, err = run_program([sys.executable, find_probe(name), *arguments], environ=environ, timeout_s=timeout_s)
    answer: dict[str, Any] = {}
    for line in out.splitlines():
        if line.startswith("{"):
            answer.update(_read_object(line))
    if status is None:
        answer[_ERROR] = f"it did not end within {timeout_s:.0f} s"
    elif status:
        answer.setdefault(_ERROR, f"{describe_status(status)}{_last_line(err)}")
    return answer


def find_probe(name: str) -> str:
    """Tell the path of a file of probes/."""
    return str(_PROBES / f"{name}.py")


def run_program(
    argv: Sequence[str], *, environ: Mapping[str, str], timeout_s: float, text: str = ""
) -> tuple[int | None, str, str]:
    """Run a program; returns its status (None: it did not end in time, and was killed), stdout and stderr.

    text: its input. A program that cannot be started has status 127 and the reason as its stderr.
    """
    try:
        process = subprocess.Popen(
            argv,
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that all it starts can be ended with it
        )
    except OSError as error:
        return 127, "", str(error)
    with process:
        try:
            out, err = process.communicate(text.encode(), timeout=timeout_s)
        except subprocess.TimeoutExpired as late:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return None, _decode(late.stdout), _decode(late.stderr)
    return process.returncode, _decode(out), _decode(err)


def describe_status(status: int) -> str:
    """Tell how a process ended."""
    if status < 0:
        try:
            return f"it was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"it was killed by signal {-status}"
    return f"it ended with status {status}"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return f": {lines[-1].strip()}" if lines else ""


def _decode(data: bytes | None) -> str:
    return (data or b"").decode(errors="replace")


def _read_object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
