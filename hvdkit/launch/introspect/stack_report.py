"""Write the stacks of all ranks' processes as text, the rarest first, from faulthandler's dumps of hvdrun's answer."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import hvdkit
from hvdkit.errors import LaunchError
from hvdkit.launch.hostfiles.names import fold
from hvdkit.launch.state.control import parse_processes

#: States of proc(5) in which a process cannot answer.
_STATES = {"T": "stopped by a signal", "t": "held by a debugger", "D": "waiting for a file system, in the kernel"}
_HVDKIT = os.path.join(os.path.dirname(hvdkit.__file__), "")  # at the same path on every host

_HEAD = re.compile(r"(?:(Thread|Current thread) 0x[0-9a-fA-F]+\b.*|(Stack) \(most recent call first\)):$")
# A dump of a single thread is the main thread's, on a signal; otherwise one thread writes the stacks of all threads,
# and its own as the current thread's.
_MAIN, _THREAD = "Stack", "Thread"
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_STARTS = ("_bootstrap", "_bootstrap_inner")  # the first frames of every thread


class Frame(NamedTuple):
    """A call that has not returned. line: 0 if unknown."""

    file: str
    line: int
    function: str


Stack = tuple[Frame, ...]


def parse_dump(text: str) -> list[Stack]:
    """Parse the stack of each thread, the main thread's first, with the innermost call last.

    text: the dump of the main thread, or the dump of all threads by hvdkit's dumping thread, which is left out; with
    both dumps, that of all threads is used. Lines that are not faulthandler's are ignored, so any text has a result.
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
    return [tuple(reversed(stack)) for stack in reversed(found)]  # the dump has the oldest thread last


@dataclass(frozen=True)
class ProcessStack:
    """The stacks of one process of a rank.

    rank, host: of the process.
    more: its pid, if it is not the rank's first process.
    stacks: see parse_dump.
    why: the reason if it has no stacks; else "".
    """

    rank: int
    host: str
    more: str = ""
    stacks: tuple[Stack, ...] = ()
    why: str = ""


def read_answer(answer: Mapping[str, Any]) -> list[ProcessStack]:
    """Parse hvdrun's answer about the stacks; by rank. Raises LaunchError for an invalid answer."""
    job, ranks = answer.get("job"), answer.get("ranks")
    hosts = job.get("hosts") if isinstance(job, dict) else None
    try:
        if not isinstance(hosts, dict) or not isinstance(ranks, dict):
            raise ValueError(f"{job!r} is not a job")
        parsed = {int(rank): None if one is None else parse_processes(one) for rank, one in ranks.items()}
    except ValueError as error:
        raise LaunchError(
            f"hvdrun is of another version of hvdkit than this command: {error}. Use the hvdkit that runs the job.",
            code="job-of-another-version",
        ) from None
    found = []
    for rank, processes in sorted(parsed.items(), key=lambda item: item[0]):
        found += read_processes(rank, str(hosts.get(str(rank), "?")), processes)
    return found


def read_processes(rank: int, host: str, processes: Sequence[Mapping[str, Any]] | None) -> list[ProcessStack]:
    """Parse the answer of a rank's agent. processes: see parse_processes; None if the agent does not answer."""
    if processes is None:
        return [ProcessStack(rank, host, why="its agent does not answer: its host may be overloaded or cut off")]
    found = []
    for process in processes:
        more = "" if process is processes[0] else f"pid {process['pid']}"
        stacks = tuple(parse_dump(process["stacks"]))
        found.append(ProcessStack(rank, host, more, stacks, "" if stacks else _explain(process)))
    return found


def _explain(process: Mapping[str, Any]) -> str:
    if not process["state"]:
        return "its process has ended"
    place = f"pid {process['pid']}, state {process['state']}"
    if process["state"] in _STATES:
        return f"{_STATES[process['state']]} ({place})"
    if not process["asked"]:
        return f"no stack, as it has not imported hvdkit ({place}): {process['command']}"
    return f"it does not answer ({place}): {process['command']}"


def format_report(doings: Sequence[ProcessStack]) -> str:
    """Write the stacks, with one entry for ranks whose main threads do the same; the smallest groups come first."""
    alike: dict[tuple[str, Stack], list[ProcessStack]] = {}
    for one in doings:
        alike.setdefault((one.why, _outside(one.stacks[0]) if one.stacks else ()), []).append(one)
    return "\n".join(_format_group(group) for group in sorted(alike.values(), key=len))


def _outside(stack: Stack) -> Stack:
    """Cut a stack where it enters hvdkit: ranks that wait in hvdkit do the same, whatever its line."""
    for at, frame in enumerate(stack):
        if frame.file.startswith(_HVDKIT):
            return (*stack[:at], frame._replace(line=0))
    return stack


def _format_group(group: Sequence[ProcessStack]) -> str:
    first = group[0]
    if first.why:
        return f"{name_ranks(group)}: {first.why}\n"
    threads: dict[Stack, list[tuple[ProcessStack, Stack]]] = {}
    for one in group:
        for each in {_outside(stack): stack for stack in one.stacks[1:] if stack}.values():  # () has no information
            threads.setdefault(_outside(each), []).append((one, each))
    same = all(one.stacks[0] == first.stacks[0] for one in group)
    shown = "" if same else f" (inside hvdkit as {name_ranks([first])} does)"
    lines = [f"{name_ranks(group)}{shown}:\n", _format_stack(first.stacks[0])]
    for found in threads.values():
        of = "" if len(found) == len(group) else f" of {name_ranks([one for one, _ in found])}"
        lines += [f"  another thread{of}:\n", _format_stack(found[0][1])]
    return "".join(lines)


def name_ranks(group: Sequence[ProcessStack]) -> str:
    """Name the ranks of processes, like "ranks 0-2, 5 on node1; 7 (pid 77) on node2"."""
    places: dict[str, list[ProcessStack]] = {}
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
