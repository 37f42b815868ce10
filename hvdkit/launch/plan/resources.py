"""Cores, shared memory and GPUs of the hosts: count them, assign GPUs to ranks, and warn of problems.

These are the quick checks of hvdkit doctor, before the command of the ranks starts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit.errors import LaunchError
from hvdkit.gpu_vendors import NVIDIA, find_vendor
from hvdkit.launch.agent.host_info import format_cpus
from hvdkit.launch.plan.gpu_sharing import GpuSharing

#: The least shared memory for the buckets of a few ranks, in MiB; Docker's default is 64.
LEAST_SHARED_MIB = 256


@dataclass(frozen=True)
class HostResources:
    """The resources of a rank's host, from its agent; see hvdkit.launch.agent.host_info.

    allowed: the CPUs that the rank may run on.
    cores: number of cores; 0 if unknown.
    shared_mib: free shared memory in MiB; negative without a directory for it.
    python: the version of Python.
    gpus: the GPUs that the rank sees, each a Gpu.
    gpu_vendor: their vendor's name.
    """

    allowed: tuple[int, ...] = ()
    cores: int = 0
    shared_mib: int = LEAST_SHARED_MIB
    python: str = ""
    gpus: tuple[tuple[str, str], ...] = ()
    gpu_vendor: str = NVIDIA.name


def take_fields(fields: object, what: str, **kinds: type) -> list[Any]:
    """Take the values of an agent's report. Raises ValueError unless they are of these types."""
    values = [fields.get(name) for name in kinds] if isinstance(fields, dict) else []
    if list(map(type, values)) != list(kinds.values()):
        raise ValueError(f"{str(fields)[:80]} is not {what}")
    return values


def parse_resources(message: Mapping[str, Any]) -> HostResources:
    """Parse an agent's message. Raises ValueError for an invalid message."""
    if not message:
        return HostResources()
    kinds = {"allowed": list, "cores": int, "shared_mib": int, "python": str, "gpus": list, "gpu_vendor": str}
    whole = {"gpu_vendor": NVIDIA.name, **message} if isinstance(message, dict) else message
    allowed, cores, shared, python, gpus, vendor = take_fields(whole, "the resources of a host", **kinds)
    if any(type(number) is not int for number in allowed) or not all(
        isinstance(gpu, list) and list(map(type, gpu)) == [str, str] for gpu in gpus
    ):
        raise ValueError(f"{message!r} does not describe a host")
    listed = tuple((name, cpus) for name, cpus in gpus)
    return HostResources(tuple(allowed), cores, shared, python, listed, vendor)


def find_problems(resources: Iterable[tuple[str, HostResources]]) -> list[str]:
    """Describe problems that make a job slow or fail, a line each. resources: (host, its resources) of each rank."""
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


#: (PCI bus id, with the number of a tile, and CPUs near it, as "0-31"); both "" if it is unknown which GPU it is.
Gpu = tuple[str, str]

#: For several ranks on one GPU, with NCCL_HOSTID, which differs between ranks. Before NCCL 2.30 the different
#: NCCL_HOSTID keep NCCL from its error "Duplicate GPU detected", from 2.30 on NCCL_MULTI_RANK_GPU_ENABLE does.
_SHARED = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MAX_CTAS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


def plan_shared_gpus(hosts: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Plan the variables of --share-gpus that all ranks have, except those that are set.

    hosts: number of hosts of the job. Raises LaunchError for several.
    """
    if hosts > 1:
        raise LaunchError(
            f"--share-gpus is for tests on one host, and this job has {hosts}: its ranks talk over the loopback "
            "interface. Leave it out, and give each host as many slots as it has GPUs.",
            code="share-gpus-on-hosts",
        )
    return {name: value for name, value in _SHARED.items() if name not in environ}


def name_rank_to_nccl(rank: int) -> dict[str, str]:
    """Plan the variable of --share-gpus that differs between ranks."""
    return {"NCCL_HOSTID": f"rank{rank}"}


def assign_gpus(seen: Sequence[Sequence[Gpu]]) -> list[Gpu]:
    """Assign each rank of a host, in rank order, the GPU that hvd.local_rank() selects; [] if ranks share a GPU.

    seen: the GPUs that each rank sees. Also [] if these are unknown.
    """
    first = seen[0]
    if all(gpus == first for gpus in seen) and 1 < len(first) >= len(seen):
        return list(first[: len(seen)])
    own = [gpus[0] for gpus in seen if len(gpus) == 1]
    names = [name for name, _ in own if name]
    return own if len(own) == len(seen) and len(set(names)) == len(names) else []


def count_gpus_in_use(resources: Iterable[tuple[str, HostResources]]) -> dict[str, str]:
    """Count the GPUs that the ranks of each host see, as "8 AMD"; hosts without GPUs are left out.

    resources: (host, those of a rank).
    """
    seen: dict[str, list[HostResources]] = defaultdict(list)
    for host, each in resources:
        seen[host].append(each)
    counts = {host: (_count_gpus([each.gpus for each in ranks]), ranks[0].gpu_vendor) for host, ranks in seen.items()}
    return {host: f"{count} {vendor}" for host, (count, vendor) in counts.items() if count}


def _count_gpus(seen: Sequence[Sequence[Gpu]]) -> int:
    """Count the GPUs that any rank of a host sees. Of unknown ones each rank that sees one sees its own."""
    named = {gpu for gpus in seen for gpu in gpus if gpu[0]}
    unknown = [sum(not name for name, _ in gpus) for gpus in seen]
    return len(named) + (sum(unknown) if max(unknown, default=0) == 1 else max(unknown, default=0))


def find_near_cpus(seen: Sequence[Sequence[Gpu]]) -> list[str]:
    """Find the CPUs near each rank's GPU, in rank order on a host; [] unless they are known for all ranks."""
    near = [cpus for _, cpus in assign_gpus(seen)]
    return near if all(near) else []


def find_shared_gpus(resources: Iterable[tuple[str, HostResources]]) -> list[tuple[str, int, int]]:
    """Find the hosts on which ranks would share GPUs: (host, ranks, GPUs). resources: (host, those of a rank)."""
    by_host: dict[str, list[Sequence[Gpu]]] = defaultdict(list)
    for host, each in resources:
        by_host[host].append(each.gpus)
    found = []
    for host, seen in by_host.items():
        alike = all(gpus == seen[0] for gpus in seen)
        if all(seen) and (alike or all(len(gpus) == 1 for gpus in seen)) and not assign_gpus(seen):
            found.append((host, len(seen), max(len(seen[0]), len({gpu for gpus in seen for gpu in gpus}))))
    return found


def check_gpus(resources: Iterable[tuple[str, HostResources]], sharing: GpuSharing) -> list[str]:
    """Describe the hosts on which ranks would share GPUs: a list of one text, or of none.

    sharing: what becomes of it. Raises LaunchError if it is refused.
    """
    known = list(resources)
    shared = find_shared_gpus(known) if sharing is not GpuSharing.ALLOWED else []
    if not shared:
        return []
    vendor = find_vendor(next(each.gpu_vendor for host, each in known if host == shared[0][0]))
    places = "; ".join(f"{host}: {ranks} ranks, but {gpus} GPU{'s' * (gpus > 1)}" for host, ranks, gpus in shared)
    slots = ",".join(f"{host}:{gpus}" for host, _, gpus in shared)
    why = f"{sharing.value} asks for one GPU a rank" if sharing.is_refused else vendor.sharing
    cure = f"Start one rank a GPU (slots, as -H {slots}), or show the ranks more GPUs ({vendor.variable})"
    other = "" if sharing.is_refused else f"; a job on CPUs can hide them: {vendor.hides}"
    text = f"{places}. {why}. {cure}; tests of correctness can use --share-gpus{other}."
    if sharing.is_refused:
        raise LaunchError(text, code="gpus-shared")
    return [text]
