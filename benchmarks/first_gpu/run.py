"""Runs the stages one after the other within a time limit. It imports the standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.first_gpu.stages import PYTHON, RESULT, Stage

_TAIL_LINES = 30
#: A stage is not begun with less time than this, in seconds.
_LEAST_S = 5.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of a stage.

    state: "done", "failed", "too slow" (ended at its time limit), "skipped" (each of its tests) or "not run".
    seconds: that it took.
    why: the reason, unless it is done.
    tail: the last lines of its output, if it failed or was too slow.
    result: what its result file holds, as JSON; None without a file.
    """

    name: str
    about: str
    kind: str
    state: str
    seconds: float = 0.0
    why: str = ""
    tail: list[str] = field(default_factory=list)
    result: Any = None


def run_stage(stage: Stage, python: str, environ: Mapping[str, str], folder: Path, left_s: float) -> Outcome:
    """Run a stage; the program and all that it started have ended when this returns. Errors of it are not raised.

    python: the interpreter.
    folder: for the result and the output.
    left_s: seconds that are left for all stages.
    """
    missing = find_missing(python, stage.needs)
    why_not = stage.why_not or (f"{' and '.join(missing)} is not installed" if missing else "")
    why_not = why_not or ("no time is left" if left_s < _LEAST_S else "")
    if why_not:
        return Outcome(stage.name, stage.about, stage.kind, "not run", why=why_not)
    result, output = folder / f"{stage.name}.{_SUFFIXES[stage.kind]}", folder / f"{stage.name}.txt"
    command = [python, *(word.replace(RESULT, str(result)).replace(PYTHON, python) for word in stage.arguments)]
    limit_s, began_s = min(stage.limit_s, left_s), time.monotonic()
    code = _run(command, environ, output, limit_s)
    seconds = time.monotonic() - began_s
    read, unreadable = _read(stage.kind, result)
    tail = output.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    state, why = "done", ""
    if code is None:
        state, why = "too slow", f"it was ended after {limit_s:.0f} s"
    elif code:
        state, why = "failed", f"exit code {code}"
    elif read is None:
        state, why = "failed", unreadable or "it wrote no result"
    elif stage.kind == "tests" and all(test["outcome"] == "skipped" for test in read):
        state, why = "skipped", read[0]["message"]
    return Outcome(stage.name, stage.about, stage.kind, state, seconds, why, [] if state == "done" else tail, read)


def find_missing(python: str, packages: Sequence[str]) -> list[str]:
    """Find the packages that an interpreter cannot import."""
    program = "import importlib.util, sys; print(*(n for n in sys.argv[1:] if importlib.util.find_spec(n) is None))"
    done = subprocess.run([python, "-c", program, *packages], capture_output=True, text=True, check=True)
    return done.stdout.split()


_SUFFIXES = {"tests": "xml", "bench": "json", "facts": "json"}


def _run(command: list[str], environ: Mapping[str, str], output: Path, limit_s: float) -> int | None:
    """Run a program in a session of its own; returns its exit code, None if it was killed at the limit."""
    with output.open("wb") as target:
        target.write(f"$ {' '.join(command)}\n".encode())
        target.flush()
        process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=target,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # hvdrun ends its ranks, also those in other sessions
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _read(kind: str, path: Path) -> tuple[Any, str]:
    """Read a result file; returns its content and why it cannot be read."""
    try:
        text = path.read_text()
        return (_read_tests(text) if kind == "tests" else json.loads(text)), ""
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, ElementTree.ParseError) as error:
        return None, f"its result cannot be read: {error}"


def _read_tests(text: str) -> list[dict[str, Any]]:
    """Read a JUnit file: name, seconds, outcome ("passed", "failed", "skipped") and message of each test."""
    found = []
    for case in ElementTree.fromstring(text).iter("testcase"):
        bad = next((entry for entry in case if entry.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if bad is None else "skipped" if bad.tag == "skipped" else "failed"
        message = "" if bad is None else bad.get("message", "").splitlines()[0]
        found.append(
            {"name": case.get("name"), "seconds": float(case.get("time", 0)), "outcome": outcome, "message": message}
        )
    if not found:
        raise ValueError("no test was chosen")
    return found
