"""Slurm's lists: nid[001-004,007],login1 with the tasks of each host beside it: 4(x4),2."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

from hvdkit.launch.hosts.dialect import Dialect
from hvdkit.launch.hosts.host import Host
from hvdkit.launch.hosts.names import check_name, parse_list, parse_slots
from hvdkit.launch.hosts.ranges import expand, fold
from hvdkit.launch.hosts.reading import Reading, content_lines, parse_assignment, read_lines
from hvdkit.world import parse_slurm_counts

NODELIST = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")


def parse(text: str) -> Reading:
    """Read compact lists, one or more a line, or the variables with their names (as `env | grep SLURM` shows them)."""
    counts: list[tuple[int, str, str]] = []
    lists: list[tuple[int, str]] = []
    named: set[str] = set()
    for number, line in content_lines(text):
        name, value = parse_assignment(line) or ("", line)
        if not name or name in NODELIST:
            if not name or value not in named:  # SLURM_NODELIST is the older name of the same list
                lists.append((number, value))
            named |= {value} if name else set()
        elif name in ("SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
            counts.append((number, name, value))
    reading = read_lines(lists, parse_nodelist)
    if counts and not reading.problems:
        number, name, value = min(counts, key=lambda count: count[1] != "SLURM_TASKS_PER_NODE")
        try:
            return replace(reading, hosts=add_counts(reading.hosts, name, value))
        except ValueError as problem:
            return replace(reading, problems=((number, str(problem)),))
    return reading


def parse_nodelist(text: str) -> list[Host]:
    """Write out a compact list, in its order. Raises ValueError for what is none."""

    def parse_part(part: str) -> list[Host]:
        if not part:
            raise ValueError(f"{text!r} has a host missing at a comma")
        return [Host(check_name(name), None) for name in expand(part)]

    return parse_list(text.strip(), parse_part)


def add_counts(hosts: Sequence[Host], name: str, text: str) -> tuple[Host, ...]:
    """Give each host its number of tasks.

    name, text: the variable: SLURM_TASKS_PER_NODE counts along the list, SLURM_NTASKS_PER_NODE is the same for all.
    Raises ValueError if it cannot be read, or counts another number of hosts.
    """
    if name == "SLURM_NTASKS_PER_NODE":
        return tuple(replace(host, slots=parse_slots(name, text)) for host in hosts)
    try:
        counts = parse_slurm_counts(text)
    except ValueError as error:
        raise ValueError(f"{name}={text!r} {error}") from None
    if len(counts) != len(hosts):
        raise ValueError(f"{name}={text!r} counts {len(counts)} hosts, and the list has {len(hosts)}")
    if 0 in counts:
        raise ValueError(f"{name}={text!r} has a host without tasks")
    return tuple(replace(host, slots=slots) for host, slots in zip(hosts, counts, strict=True))


def write(hosts: Sequence[Host]) -> str:
    """Write the two variables that Slurm would set."""
    runs = [(slots, len(list(run))) for slots, run in itertools.groupby(host.slots for host in hosts)]
    tasks = ",".join(f"{slots}(x{times})" if times > 1 else f"{slots}" for slots, times in runs)
    return f"SLURM_JOB_NODELIST={fold(host.name for host in hosts)}\nSLURM_TASKS_PER_NODE={tasks}\n"


def _could_be(text: str) -> bool:
    """Without brackets, commas or Slurm's names it is a list of names, which others have too."""
    return bool(re.search(r"[^\s@:=]\[[0-9]|,|SLURM_", text))


SLURM = Dialect(
    name="slurm",
    title="Slurm",
    parse=parse,
    write=write,
    unsaid=1,
    rule="a host runs one rank unless SLURM_TASKS_PER_NODE says more",
    could_be=_could_be,
)
