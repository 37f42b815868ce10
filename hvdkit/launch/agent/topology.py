"""The CPUs of a host: which are one physical core, and which lie by the same memory. Read from Linux's /sys."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

SYSTEM = Path("/sys/devices/system")


class Cpu(NamedTuple):
    """A hardware thread, by its number.

    core: the lowest number of those on its physical core. node: of its NUMA node, or of its socket where no nodes are
    shown.
    """

    number: int
    core: int
    node: int


def read_topology(cpus: Iterable[int], system: Path = SYSTEM) -> tuple[Cpu, ...]:
    """Look up these CPUs; each is a core of its own, on node 0, where nothing is shown. system: /sys/devices/system."""
    nodes = {
        number: int(folder.name[len("node") :])
        for folder in system.glob("node/node[0-9]*")
        for number in parse_cpus(_read(folder / "cpulist"))
    }
    found = []
    for number in sorted(cpus):
        topology = system / f"cpu/cpu{number}/topology"
        siblings = parse_cpus(_read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list"))
        socket = _read(topology / "physical_package_id")
        node = nodes.get(number, int(socket) if re.fullmatch(r"\d+", socket) else 0)
        found.append(Cpu(number, min([number, *siblings]), node))
    return tuple(found)


def parse_cpus(text: str) -> list[int]:
    """Write out a list such as "0-3,8" in ascending order; what is not of this form counts for nothing."""
    numbers: set[int] = set()
    for first, last in re.findall(r"(?<![0-9])([0-9]{1,4})(?:-([0-9]{1,4}))?(?![0-9])", text):
        numbers.update(range(int(first), int(last or first) + 1))
    return sorted(numbers)


def format_cpus(cpus: Iterable[int]) -> str:
    """Write a set such as {0, 1, 2, 3, 8} as "0-3,8"."""
    ranges: list[list[int]] = []
    for number in sorted(cpus):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
