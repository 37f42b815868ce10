"""What is found wrong on the hosts when all ranks are there, before any of them starts: the cheap part of doctor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hvdkit.launch.agent.topology import format_cpus

#: Less is too little for the buckets of a few ranks.
_LEAST_SHARED_MIB = 64


@dataclass(frozen=True)
class Machine:
    """A rank's host as its agent sees it; see hvdkit.launch.agent.machine. cores: 0 where nothing is known."""

    allowed: tuple[int, ...] = ()
    cores: int = 0
    shared_mib: int = _LEAST_SHARED_MIB
    python: str = ""


def parse_machine(told: Mapping[str, Any]) -> Machine:
    """Take what an agent has sent; raises ValueError for what no agent sends."""
    if not told:
        return Machine()
    found: list[Any] = [None] * 4
    if isinstance(told, Mapping):
        found = [told.get(name) for name in ("allowed", "cores", "shared_mib", "python")]
    allowed, cores, shared, python = found
    if (
        not isinstance(allowed, list)
        or any(type(number) is not int for number in (*allowed, cores, shared))
        or not isinstance(python, str)
    ):
        raise ValueError(f"{told!r} is no machine")
    return Machine(tuple(allowed), cores, shared, python)


def find_troubles(machines: Iterable[tuple[str, Machine]]) -> list[str]:
    """Say what will be slow or fail, and the cure, a line each. machines: (host, what its agent saw) of each rank."""
    by_host: dict[str, list[Machine]] = defaultdict(list)
    for host, machine in machines:
        by_host[host].append(machine)
    found = []
    for host, ranks in by_host.items():
        found += [text for check in (_check_cores, _check_shared) if (text := check(host, ranks))]
    versions: dict[str, list[str]] = defaultdict(list)
    for host, ranks in by_host.items():
        versions[ranks[0].python].append(host)
    if len(versions) > 1:
        told = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in versions.items())
        found.append(f"the hosts have different Pythons: {told}. Use one environment, at the same path on all hosts.")
    return found


def _check_cores(host: str, ranks: list[Machine]) -> str:
    shared = {core for machine in ranks for core in machine.allowed}
    if not 0 < len(shared) < min(ranks[0].cores, len(ranks)):
        return ""
    which = f"core {min(shared)}" if len(shared) == 1 else f"cores {format_cpus(shared)}"
    return (
        f"{host}: all {len(ranks)} ranks may use {which} only, of {ranks[0].cores}. Start hvdrun without taskset, and "
        f"without --binding-args that say so; under Slurm ask for --cpus-per-task, or --ntasks-per-node={len(ranks)}."
    )


def _check_shared(host: str, ranks: list[Machine]) -> str:
    free = ranks[0].shared_mib
    if len(ranks) < 2 or free >= _LEAST_SHARED_MIB:
        return ""
    seen = "there is no folder for shared memory" if free < 0 else f"shared memory has {free} MiB left"
    return f"{host}: {seen}. Docker: --shm-size=8g; or HVDKIT_SHARED_DIRECTORY. More: hvdkit doctor."
