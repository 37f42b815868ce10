"""Lists of hosts as schedulers write them: Slurm's variables, LSF's, and SGE's PE_HOSTFILE.

Slurm: nid[001-004,007],login1, with the tasks of each host in 4(x4),2. LSF: "node1 4 node2 4", or "node1 node1 node2".
SGE: node1 4 all.q@node1 UNDEFINED. All parsers raise ValueError with a sentence for the user.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

from hvdkit.launch.hostfiles.grammars import Reading, content_lines, parse_assignment, read_lines
from hvdkit.launch.hostfiles.host import Host
from hvdkit.launch.hostfiles.names import check_name, expand, fold, is_slots, parse_hosts, parse_list, parse_slots
from hvdkit.world import parse_slurm_counts

SLURM_NODELISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
_SLURM_COUNTS = ("SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
_LSF_LISTS = ("LSB_MCPU_HOSTS", "LSB_HOSTS")


def read_slurm(text: str) -> Reading:
    """Read nodelists, one or more a line, or the variables with their names (the output of `env | grep SLURM`)."""
    counts: dict[str, tuple[int, str]] = {}
    nodelists: dict[str, tuple[int, str]] = {}
    for number, line in content_lines(text):
        name, value = parse_assignment(line) or ("", line)
        if not name:
            nodelists[f"{number}"] = (number, value)
        elif name in SLURM_NODELISTS:
            nodelists.setdefault(f"={value}", (number, value))  # SLURM_NODELIST is the older name of the same list
        elif name in _SLURM_COUNTS:
            counts.setdefault(name, (number, value))
    reading = read_lines(nodelists.values(), parse_nodelist)
    name = next((name for name in _SLURM_COUNTS if name in counts), "")
    if not name or reading.problems:
        return reading
    number, value = counts[name]
    try:
        return replace(reading, hosts=add_slurm_counts(reading.hosts, name, value))
    except ValueError as problem:
        return replace(reading, problems=((number, str(problem)),))


def parse_nodelist(text: str) -> list[Host]:
    """Expand Slurm's nodelist, in its order."""

    def parse_node(part: str) -> list[Host]:
        if not part:
            raise ValueError(f"{text!r} has a host name missing at a comma")
        return [Host(check_name(name), None) for name in expand(part)]

    return parse_list(text.strip(), parse_node)


def add_slurm_counts(hosts: Sequence[Host], name: str, text: str) -> tuple[Host, ...]:
    """Set each host's slots to its number of tasks.

    name, text: the variable: SLURM_TASKS_PER_NODE counts along the list, SLURM_NTASKS_PER_NODE is the same for all.
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


def write_slurm(hosts: Sequence[Host]) -> str:
    """Write the two variables that Slurm would set."""
    runs = [(slots, len(list(run))) for slots, run in itertools.groupby(host.slots for host in hosts)]
    tasks = ",".join(f"{slots}(x{times})" if times > 1 else f"{slots}" for slots, times in runs)
    return f"SLURM_JOB_NODELIST={fold(host.name for host in hosts)}\nSLURM_TASKS_PER_NODE={tasks}\n"


def is_slurm(text: str) -> bool:
    """Is it a nodelist? Without brackets, commas or Slurm's variables it is a list of names, as other tools have."""
    return bool(re.search(r"[^\s@:=]\[[0-9]|,|SLURM_", text))


def parse_lsf_pairs(text: str) -> list[Host]:
    """Parse "node1 4 node2 4"."""
    words = text.split()
    if len(words) % 2:
        raise ValueError(f"{text!r} has {len(words)} words; write pairs of a host and its number of slots")
    return [
        replace(host, slots=parse_slots(f"the number of {name}", slots))
        for name, slots in zip(words[::2], words[1::2], strict=True)
        for host in parse_hosts(name)
    ]


def parse_lsf_repeats(text: str) -> list[Host]:
    """Parse "node1 node1 node2"."""
    return [host for word in text.split() for host in parse_hosts(word)]


def parse_lsf_line(content: str) -> list[Host]:
    """Parse pairs or repeated hosts, or one of LSF's variables with its name."""
    assignment = parse_assignment(content)
    if assignment is not None:
        name, value = assignment
        if name not in _LSF_LISTS:
            raise ValueError(f"{name} is not a list of hosts. Use {' or '.join(_LSF_LISTS)}")
        return parse_lsf_pairs(value) if name == "LSB_MCPU_HOSTS" else parse_lsf_repeats(value)
    words = content.split()
    return parse_lsf_pairs(content) if len(words) > 1 and is_slots(words[1]) else parse_lsf_repeats(content)


def write_lsf(hosts: Sequence[Host]) -> str:
    """Write LSB_MCPU_HOSTS."""
    return f'LSB_MCPU_HOSTS="{" ".join(f"{host.name} {host.slots}" for host in hosts)}"\n'


def is_lsf(text: str) -> bool:
    """Could it be LSF's? Any words are hosts by LSF's rules, so every line must be a name, pairs or a variable."""
    for _, line in content_lines(text):
        words = line.split()
        pairs = len(words) % 2 == 0 and all(is_slots(word) for word in words[1::2])
        if len(words) > 1 and not pairs and not line.startswith(_LSF_LISTS):
            return False
    return True


def parse_sge_line(content: str) -> list[Host]:
    """Parse a line of a PE_HOSTFILE; a host with several queues has several lines."""
    words = content.split()
    if not 2 <= len(words) <= 4:
        raise ValueError(f"{content!r} should be: host, slots, queue, processors, like: node1 4 all.q@node1 UNDEFINED")
    return [replace(host, slots=parse_slots("slots", words[1])) for host in parse_hosts(words[0])]


def is_sge(text: str) -> bool:
    """Could it be SGE's? A third word is a queue on a host, queue@host; without it these would be LSF's pairs."""
    lines = [line.split() for _, line in content_lines(text)]
    return all("@" in words[2] for words in lines if len(words) > 2)
