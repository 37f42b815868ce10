"""What the processes of all ranks are doing, the odd ones first; from what hvdrun answers to text."""

from __future__ import annotations

import linecache
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import hvdkit
from hvdkit.errors import LaunchError
from hvdkit.launch.dump import Stack, parse_dump
from hvdkit.launch.hosts.ranges import fold
from hvdkit.launch.reports import parse_processes

#: States of proc(5) in which a process can answer nothing.
_STATES = {"T": "stopped by a signal", "t": "held by a debugger", "D": "waiting for a file system, in the kernel"}
_HVDKIT = os.path.join(os.path.dirname(hvdkit.__file__), "")  # at the same path on every host


@dataclass(frozen=True)
class Doing:
    """What a process of a rank does.

    more: its pid, if it is not the rank's first process. stacks: see parse_dump. why: it shows none, "" if it does.
    """

    rank: int
    host: str
    more: str = ""
    stacks: tuple[Stack, ...] = ()
    why: str = ""


def read_answer(answer: Mapping[str, Any]) -> list[Doing]:
    """Take what hvdrun answers about the stacks; by rank. Raises LaunchError for what it does not answer."""
    job, ranks = answer.get("job"), answer.get("ranks")
    hosts = job.get("hosts") if isinstance(job, dict) else None
    try:
        if not isinstance(hosts, dict) or not isinstance(ranks, dict):
            raise ValueError(f"{job!r} is no job")
        parsed = {int(rank): None if one is None else parse_processes(one) for rank, one in ranks.items()}
    except ValueError as error:
        raise LaunchError(
            f"This hvdrun is of another version of hvdkit: {error}. Take the hvdkit that it is of."
        ) from None
    found = []
    for rank, processes in sorted(parsed.items(), key=lambda item: item[0]):
        found += read_processes(rank, str(hosts.get(str(rank), "?")), processes)
    return found


def read_processes(rank: int, host: str, processes: Sequence[Mapping[str, Any]] | None) -> list[Doing]:
    """Take what the agent of a rank answers, see parse_processes; None if it does not."""
    if processes is None:
        return [Doing(rank, host, why="its agent does not answer: is its host overloaded, or cut off?")]
    found = []
    for process in processes:
        more = "" if process is processes[0] else f"pid {process['pid']}"
        stacks = tuple(parse_dump(process["stacks"]))
        found.append(Doing(rank, host, more, stacks, "" if stacks else _explain(process)))
    return found


def _explain(process: Mapping[str, Any]) -> str:
    if not process["state"]:
        return "its process has ended"
    place = f"pid {process['pid']}, state {process['state']}"
    if process["state"] in _STATES:
        return f"{_STATES[process['state']]} ({place})"
    if not process["asked"]:
        return f"nothing in it has imported hvdkit yet ({place}): {process['command']}"
    return f"it does not answer ({place}): {process['command']}"


def format_report(doings: Sequence[Doing]) -> str:
    """Write ranks whose main threads do the same as one; the fewest first, then in the order of ranks."""
    alike: dict[tuple[str, Stack], list[Doing]] = {}
    for one in doings:
        alike.setdefault((one.why, _outside(one.stacks[0]) if one.stacks else ()), []).append(one)
    return "\n".join(_format_group(group) for group in sorted(alike.values(), key=len))


def _outside(stack: Stack) -> Stack:
    """A stack up to where it enters hvdkit: ranks that wait look here and there meanwhile, and do the same."""
    for at, frame in enumerate(stack):
        if frame.file.startswith(_HVDKIT):
            return (*stack[:at], frame._replace(line=0))
    return stack


def _format_group(group: Sequence[Doing]) -> str:
    first = group[0]
    if first.why:
        return f"{name_ranks(group)}: {first.why}\n"
    threads: dict[Stack, list[tuple[Doing, Stack]]] = {}
    for one in group:
        for each in {_outside(stack): stack for stack in one.stacks[1:] if stack}.values():  # () says nothing
            threads.setdefault(_outside(each), []).append((one, each))
    same = all(one.stacks[0] == first.stacks[0] for one in group)
    shown = "" if same else f" (inside hvdkit as {name_ranks([first])} does)"
    lines = [f"{name_ranks(group)}{shown}:\n", _format_stack(first.stacks[0])]
    for found in threads.values():
        of = "" if len(found) == len(group) else f" of {name_ranks([one for one, _ in found])}"
        lines += [f"  another thread{of}:\n", _format_stack(found[0][1])]
    return "".join(lines)


def name_ranks(group: Sequence[Doing]) -> str:
    """Write who they are, like "ranks 0-2, 5 on node1; 7 (pid 77) on node2"."""
    places: dict[str, list[Doing]] = {}
    for one in group:
        places.setdefault(one.host, []).append(one)
    parts = []
    for host, ones in places.items():
        ranks = fold(str(one.rank) for one in ones if not one.more).strip("[]").split(",")
        words = [*filter(None, ranks), *(f"{one.rank} ({one.more})" for one in ones if one.more)]
        parts.append(f"{', '.join(words)} on {host}")
    return f"rank{'s' * (len(group) > 1)} {'; '.join(parts)}"


def _format_stack(stack: Stack) -> str:
    lines = []
    for file, line, function in stack:
        lines.append(f'    File "{file}", line {line or "?"}, in {function}\n')
        text = linecache.getline(file, line).strip()  # as it is on this host
        if text:
            lines.append(f"      {text}\n")
    return "".join(lines) or "    no Python\n"
