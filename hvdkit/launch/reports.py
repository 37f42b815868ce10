"""What agents say of their ranks, from bytes. Each function raises ValueError for what no agent sends."""

from __future__ import annotations

import json
from typing import Any

from hvdkit.launch.ranks import End, Start


def parse_report(payload: bytes) -> dict[str, Any]:
    """Read what is said in JSON; always an object."""
    try:
        found = json.loads(payload)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"{payload[:40]!r} is no object of JSON")
    return found


def parse_start(payload: bytes) -> Start:
    """Read that a rank's command runs."""
    fields = parse_report(payload)
    pid, threads, cpus, bound = (fields.get(name) for name in ("pid", "threads", "cpus", "bound"))
    if type(pid) is not int or not isinstance(threads, str) or not isinstance(cpus, str) or not isinstance(bound, bool):
        raise ValueError(f"{payload[:40]!r} is no start")
    return Start(pid, threads, cpus, bound)


def parse_end(payload: bytes) -> End:
    """Read how a rank's command has ended."""
    fields = parse_report(payload)
    names = ("code", "signal", "told", "tail", "tail_of_stderr", "time")
    code, number, told, tail, of_stderr, time = (fields.get(name) for name in names)
    if (
        type(code) is not int
        or type(number) is not int
        or not isinstance(told, str)
        or not isinstance(tail, list)
        or not isinstance(of_stderr, bool)
        or not isinstance(time, (int, float))
    ):
        raise ValueError(f"{payload[:40]!r} is no end")
    return End(code, number, told, tuple(map(str, tail)), time, of_stderr)


def parse_doing(payload: bytes) -> tuple[int, list[dict[str, Any]]]:
    """Read the answer to a question, see agent/stacks.py: the question's number, and what each process does."""
    fields = parse_report(payload)
    question, processes = fields.get("question"), fields.get("processes")
    if type(question) is not int:
        raise ValueError(f"{payload[:40]!r} is no answer")
    return question, parse_processes(processes)


def parse_processes(told: object) -> list[dict[str, Any]]:
    """Check a list of what processes do."""
    kinds = {"pid": int, "state": str, "command": str, "stacks": str, "asked": bool}
    if not isinstance(told, list):
        raise ValueError(f"{told!r} is no list of processes")
    for one in told:
        if not isinstance(one, dict) or any(type(one.get(name)) is not kind for name, kind in kinds.items()):
            raise ValueError(f"{one!r} is no process")
    return told
