"""LSF's lists: LSB_MCPU_HOSTS "node1 4 node2 4", LSB_HOSTS "node1 node1 node2", and the file LSB_DJOB_HOSTFILE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hvdkit.launch.hosts.dialect import Dialect
from hvdkit.launch.hosts.host import Host
from hvdkit.launch.hosts.names import is_slots, parse_hosts, parse_slots
from hvdkit.launch.hosts.reading import Reading, content_lines, count_repeats, parse_assignment, read_lines

_VARIABLES = ("LSB_MCPU_HOSTS", "LSB_HOSTS")


def parse(text: str) -> Reading:
    """Read hosts with numbers, or hosts repeated once for each rank; or LSF's variables under their names."""
    return read_lines(content_lines(text), _parse_line, merge=count_repeats)


def parse_pairs(text: str) -> list[Host]:
    """Read "node1 4 node2 4". Raises ValueError for anything else."""
    words = text.split()
    if len(words) % 2:
        raise ValueError(f"{text!r} has {len(words)} words; it should be a host and its number, in turn")
    return [
        replace(host, slots=parse_slots(f"the number of {name}", slots))
        for name, slots in zip(words[::2], words[1::2], strict=True)
        for host in parse_hosts(name)
    ]


def parse_repeats(text: str) -> list[Host]:
    """Read "node1 node1 node2". Raises ValueError for anything else."""
    return [host for word in text.split() for host in parse_hosts(word)]


def write(hosts: Sequence[Host]) -> str:
    """Write LSB_MCPU_HOSTS."""
    return f'LSB_MCPU_HOSTS="{" ".join(f"{host.name} {host.slots}" for host in hosts)}"\n'


def _parse_line(content: str) -> list[Host]:
    assignment = parse_assignment(content)
    if assignment is not None:
        name, value = assignment
        if name not in _VARIABLES:
            raise ValueError(f"{name} is not a list of hosts. Use {' or '.join(_VARIABLES)}")
        return parse_pairs(value) if name == "LSB_MCPU_HOSTS" else parse_repeats(value)
    words = content.split()
    return parse_pairs(content) if len(words) > 1 and is_slots(words[1]) else parse_repeats(content)


def _could_be(text: str) -> bool:
    """Any words are hosts by LSF's rules, so what nobody has called LSF's must look the part on every line."""
    for _, line in content_lines(text):
        words = line.split()
        pairs = len(words) % 2 == 0 and all(is_slots(word) for word in words[1::2])
        if len(words) > 1 and not pairs and not line.startswith(_VARIABLES):
            return False
    return True


LSF = Dialect(
    name="lsf",
    title="LSF",
    parse=parse,
    write=write,
    unsaid=1,
    rule="a host runs one rank for each time it is named, or as many as the number after it",
    carries=frozenset({"slots", "ipv6"}),
    could_be=_could_be,
)
