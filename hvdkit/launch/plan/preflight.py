"""Check the resources of the hosts before the command starts: the quick part of hvdkit doctor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hvdkit.launch.agent.topology import format_cpus

#: The least shared memory for the buckets of a few ranks, in MiB; Docker's default is 64.
LEAST_SHARED_MIB = 256


@dataclass(frozen=True)
class HostResources:
    """The resources of a rank's host, from its agent; see hvdkit.launch.agent.host_info. cores: 0 if unknown.

    gpus: that the rank sees, see hvdkit.launch.plan.gpus.Gpu.
    """

    allowed: tuple[int, ...] = ()
    cores: int = 0
    shared_mib: int = LEAST_SHARED_MIB
    python: str = ""
    gpus: tuple[tuple[str, str], ...] = ()


def parse_resources(message: Mapping[str, Any]) -> HostResources:
    """Parse an agent's message. Raises ValueError for an invalid one."""
    if not message:
        return HostResources()
    values: list[Any] = [None] * 5
    if isinstance(message, Mapping):
        values = [message.get(name) for name in ("allowed", "cores", "shared_mib", "python", "gpus")]
    allowed, cores, shared, python, gpus = values
    if (
        not isinstance(allowed, list)
        or any(type(number) is not int for number in (*allowed, cores, shared))
        or not isinstance(python, str)
        or not isinstance(gpus, list)
        or not all(isinstance(gpu, list) and len(gpu) == 2 and all(type(x) is str for x in gpu) for gpu in gpus)
    ):
        raise ValueError(f"{message!r} does not describe a host")
    return HostResources(tuple(allowed), cores, shared, python, tuple((name, cpus) for name, cpus in gpus))


def find_problems(resources: Iterable[tuple[str, HostResources]]) -> list[str]:
    """Describe what will be slow or fail, a line each. resources: (host, its resources) of each rank."""
    by_host: dict[str, list[HostResources]] = defaultdict(list)
    for host, each in resources:
        by_host[host].append(each)
    problems = []
    for host, ranks in by_host.items():
        problems += [text for check in (_check_cores, _check_shared) if (text := check(host, ranks))]
    versions: dict[str, list[str]] = defaultdict(list)
    for host, ranks in by_host.items():
        versions[ranks[0].python].append(host)
    if len(versions) > 1:
        listed = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in versions.items())
        problems.append(
            f"the hosts have different versions of Python: {listed}. Use one environment, at the same path everywhere."
        )
    return problems


def _check_cores(host: str, ranks: list[HostResources]) -> str:
    shared = {core for each in ranks for core in each.allowed}
    if not 0 < len(shared) < min(ranks[0].cores, len(ranks)):
        return ""
    which = f"core {min(shared)}" if len(shared) == 1 else f"cores {format_cpus(shared)}"
    return (
        f"{host}: all {len(ranks)} ranks are restricted to {which} of {ranks[0].cores}. Start hvdrun without "
        "taskset and without these --binding-args; under Slurm request --cpus-per-task, or "
        f"--ntasks-per-node={len(ranks)}."
    )


def _check_shared(host: str, ranks: list[HostResources]) -> str:
    free = ranks[0].shared_mib
    if len(ranks) < 2 or free >= LEAST_SHARED_MIB:
        return ""
    state = "there is no directory for shared memory" if free < 0 else f"shared memory has {free} MiB free"
    return f"{host}: {state}. In Docker use --shm-size=8g, else set HVDKIT_SHARED_DIRECTORY. See hvdkit doctor."
