"""Parse the reports of agents. Each function raises ValueError for a malformed one."""

from __future__ import annotations

import json
from typing import Any

from hvdkit.launch.job.ranks import End, Start


def parse_report(payload: bytes) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        found = json.loads(payload)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"{payload[:40]!r} is not a JSON object")
    return found


def parse_start(payload: bytes) -> Start:
    """Parse the report that a rank's command was started."""
    fields = parse_report(payload)
    pid, threads, cpus, bound = (fields.get(name) for name in ("pid", "threads", "cpus", "bound"))
    if type(pid) is not int or not isinstance(threads, str) or not isinstance(cpus, str) or not isinstance(bound, bool):
        raise ValueError(f"{payload[:40]!r} is not a START report")
    return Start(pid, threads, cpus, bound)


def parse_end(payload: bytes) -> End:
    """Parse the report of how a rank's command has ended."""
    fields = parse_report(payload)
    names = ("code", "signal", "ended_by", "tail", "tail_of_stderr", "time")
    code, number, ended_by, tail, of_stderr, time = (fields.get(name) for name in names)
    if (
        type(code) is not int
        or type(number) is not int
        or not isinstance(ended_by, str)
        or not isinstance(tail, list)
        or not isinstance(of_stderr, bool)
        or not isinstance(time, (int, float))
    ):
        raise ValueError(f"{payload[:40]!r} is not an END report")
    return End(code, number, ended_by, tuple(map(str, tail)), time, of_stderr)


def parse_stacks(payload: bytes) -> tuple[int, list[dict[str, Any]]]:
    """Parse the answer to a query, see agent/stacks.py: its number, and the stacks of each process."""
    fields = parse_report(payload)
    query, processes = fields.get("query"), fields.get("processes")
    if type(query) is not int:
        raise ValueError(f"{payload[:40]!r} is not a STACKS report")
    return query, parse_processes(processes)


def parse_processes(processes: object) -> list[dict[str, Any]]:
    """Check a list of processes with their stacks."""
    kinds = {"pid": int, "state": str, "command": str, "stacks": str, "asked": bool}
    if not isinstance(processes, list):
        raise ValueError(f"{processes!r} is not a list of processes")
    for one in processes:
        if not isinstance(one, dict) or any(type(one.get(name)) is not kind for name, kind in kinds.items()):
            raise ValueError(f"{one!r} is not a process")
    return processes
