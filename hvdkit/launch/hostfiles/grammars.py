"""The grammars of host lists: `host key=N`, `host:N`, a host repeated for each rank; and those of schedulers.

Slurm: nid[001-004,007],login1, with the tasks of each host in 4(x4),2. LSF: "node1 4 node2 4", or "node1 node1 node2".
SGE: node1 4 all.q@node1 UNDEFINED.

Line parsers raise ValueError with a sentence for the user. `read_lines` collects these problems, so that all problems
of a file are reported together.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hvdkit.launch.hostfiles.names import (
    MOST_HOSTS,
    NAME,
    Host,
    check_name,
    check_user,
    expand,
    fold,
    is_slots,
    merge_hosts,
    parse_hosts,
    parse_list,
    parse_slots,
    split_slots,
)
from hvdkit.world import parse_slurm_counts

_ASSIGNMENT = re.compile(r"\s*(?:export\s+)?([A-Z_][A-Z0-9_]*)=(.*)", re.ASCII | re.DOTALL)
# Keys of Open MPI's old hostfiles.
_UNSUPPORTED = {
    "port": "Write the port for that host in ~/.ssh/config, as 'Port N'",
    **dict.fromkeys(
        ("boards", "sockets", "sockets_per_board", "sockets-per-board", "cores", "cores_per_socket"),
        "Leave it out: mpirun detects the hardware of a host",
    ),
}


@dataclass(frozen=True)
class Reading:
    """A text as parsed in one dialect.

    hosts: each once; slots None if the text gives none.
    problems: (line, problem and solution), lines counted from 1; the hosts are valid only if this is ().
    notes: about words that were parsed and are not used.
    """

    hosts: tuple[Host, ...]
    problems: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()


def content_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, line) for lines with content, without comments (#) and surrounding blanks."""
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        content = line.partition("#")[0].strip()
        if content:
            yield number, content


def read_lines(
    lines: Iterable[tuple[int, str]],
    parse_line: Callable[[str], Iterable[Host]],
    merge: Callable[[Iterable[Host]], tuple[Host, ...]] = merge_hosts,
) -> Reading:
    """Parse numbered lines with `parse_line`. merge: merges repeated hosts."""
    hosts: list[Host] = []
    problems: list[tuple[int, str]] = []
    for number, content in lines:
        try:
            hosts += parse_line(content)
        except ValueError as problem:
            problems.append((number, str(problem)))
        if len(hosts) > MOST_HOSTS:
            problems.append((number, f"the file has more than {MOST_HOSTS} hosts up to here. Check the ranges above"))
            return Reading((), tuple(problems))
    return Reading(merge(hosts), tuple(problems))


def keep_first(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Merge hosts; a repeated host counts once."""
    return tuple({host.login: host for host in hosts}.values())


def count_repeats(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Merge hosts whose lines are slots: if a host is repeated, hosts without repetition have one slot."""
    merged = merge_hosts(hosts)
    if any(host.slots is not None for host in merged):
        return tuple(replace(host, slots=host.slots or 1) for host in merged)
    return merged


def refuse_repeats(parse_line: Callable[[str], list[Host]], why: str) -> Callable[[str], list[Host]]:
    """Extend a line parser: a host of an earlier line is a problem. why: the rest of the sentence."""
    logins: set[str] = set()

    def parse_once(content: str) -> list[Host]:
        hosts = parse_line(content)
        for host in hosts:
            if host.login in logins:
                raise ValueError(f"{host.login} is repeated{why}")
            logins.add(host.login)
        return hosts

    return parse_once


def parse_keyed(content: str, keys: Mapping[str, str]) -> list[Host]:
    """Parse a host followed by key=number words.

    keys: word -> slots, max_slots or user.
    """
    name, *words = "=".join(part.strip() for part in content.split("=")).split()
    if name.startswith("-"):
        check_name(name)
    if "=" in name:
        raise ValueError(f"{name!r} is where the host name should be. Write: node1 slots=4")
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key in _UNSUPPORTED:
            raise ValueError(f"{word!r} is not supported. {_UNSUPPORTED[key]}")
        if not equals or key not in keys:
            raise ValueError(
                f"{word!r} is not a valid word here. Use slots=N or max_slots=N after the name, like: node1 slots=4"
            )
        if keys[key] in values:
            raise ValueError(f"{key} is given twice. Remove one of them")
        values[keys[key]] = value
    slots, most = (parse_slots(key, values[key]) if key in values else None for key in ("slots", "max_slots"))
    hosts = [replace(host, slots=slots, max_slots=most) for host in _parse_bare_name(name)]
    if "user" in values:
        hosts = [replace(host, user=check_user(values["user"])) for host in hosts]
    if slots and most and most < slots:
        raise ValueError(f"max_slots={most} is below slots={slots}. Raise max_slots or remove it")
    return hosts


def parse_numbered(word: str) -> list[Host]:
    """Parse host or host:slots."""
    if not word:
        raise ValueError("a host name is missing next to a comma")
    name, slots = split_slots(word)
    hosts = parse_hosts(name)
    return hosts if slots is None else [replace(host, slots=parse_slots("slots", slots)) for host in hosts]


def parse_single_name(content: str) -> list[Host]:
    """Parse a line with a host's name alone, as a nodefile has it once for each rank."""
    if len(content.split()) > 1 or "=" in content or content.count(":") == 1:
        raise ValueError(
            f"{content!r} is more than a host name. A nodefile has one host name per line, repeated once for each rank"
        )
    return parse_hosts(content)


def parse_assignment(line: str) -> tuple[str, str] | None:
    """Split NAME=value or export NAME="value" of a shell; None for any other line."""
    match = _ASSIGNMENT.fullmatch(line)
    if match is None:
        return None
    value = match[2].strip()
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    return match[1], value


def require_slots(hosts: list[Host], content: str, tool: str) -> list[Host]:
    """Return the hosts. Raises ValueError for a host without slots."""
    if any(host.slots is None for host in hosts):
        raise ValueError(f"{content!r} has no slots, and {tool} has no default. Write: {hosts[0].login} slots=4")
    return hosts


def _parse_bare_name(name: str) -> list[Host]:
    host, colon, slots = name.rpartition(":")
    if colon and NAME.fullmatch(host.rpartition("@")[2]) and is_slots(slots):
        raise ValueError(f"{name!r} is MPICH's format. In Open MPI's format write: {host} slots={slots}")
    if name.startswith("^"):
        raise ValueError(f"{name!r} excludes a host, which hvdrun does not support. Remove the line of that host")
    if name.startswith("+"):
        raise ValueError(f"{name!r} is a relative index, which hvdrun does not support. Write the host's name")
    return parse_hosts(name)


SLURM_NODELISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
_SLURM_COUNTS = ("SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
_LSF_LISTS = ("LSB_MCPU_HOSTS", "LSB_HOSTS")


def read_slurm(text: str) -> Reading:
    """Read nodelists, one or more in a line, or variables with their names (the output of `env | grep SLURM`)."""
    counts: dict[str, tuple[int, str]] = {}
    nodelists: dict[str, tuple[int, str]] = {}
    for number, line in content_lines(text):
        name, value = parse_assignment(line) or ("", line)
        if not name:
            nodelists[f"{number}"] = (number, value)
        elif name in SLURM_NODELISTS:
            nodelists.setdefault(f"={value}", (number, value))  # SLURM_NODELIST is an older name of the same list
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
    """Is it a nodelist? Without brackets, commas or Slurm's variables it is a list of names, as other tools write."""
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
    """Can it be LSF's? Any words are hosts by LSF's rules, so every line must be a name, pairs or a variable."""
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
    """Can it be SGE's? The third word is a queue on a host, queue@host; without it the words would be LSF's pairs."""
    lines = [line.split() for _, line in content_lines(text)]
    return all("@" in words[2] for words in lines if len(words) > 2)
