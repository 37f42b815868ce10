"""One GPU a rank: which rank has which, what is said where ranks would share one, and the variables to let them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from hvdkit.errors import LaunchError
from hvdkit.launch.plan.preflight import HostResources

#: (PCI bus id, CPUs near it, as "0-31"); both "" if it is not known which GPU of the host it is.
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
    """Plan the variables of --share-gpus that all ranks have, but for those that are set.

    hosts: of the job. Raises LaunchError for several.
    """
    if hosts > 1:
        raise LaunchError(
            f"--share-gpus is for tests on one host, and this job has {hosts}: its ranks talk over the loopback "
            "interface. Leave it out, and give each host as many slots as it has GPUs."
        )
    return {name: value for name, value in _SHARED.items() if name not in environ}


def name_rank_to_nccl(rank: int) -> dict[str, str]:
    """Plan the variable of --share-gpus that each rank has for itself."""
    return {"NCCL_HOSTID": f"rank{rank}"}


def assign_gpus(seen: Sequence[Sequence[Gpu]]) -> list[Gpu]:
    """Assign the ranks of a host, in their order, a GPU each, as hvd.local_rank() selects it; [] if some share one.

    seen: by each rank. Also [] if it is not known what the ranks see.
    """
    first = seen[0]
    if all(gpus == first for gpus in seen) and 1 < len(first) >= len(seen):
        return list(first[: len(seen)])
    own = [gpus[0] for gpus in seen if len(gpus) == 1]
    names = [name for name, _ in own if name]
    return own if len(own) == len(seen) and len(set(names)) == len(names) else []


def find_near_cpus(seen: Sequence[Sequence[Gpu]]) -> list[str]:
    """Find the CPUs near each rank's GPU, for the ranks of a host in their order; [] unless they are known of all."""
    near = [cpus for _, cpus in assign_gpus(seen)]
    return near if all(near) else []


def find_shared_gpus(resources: Iterable[tuple[str, HostResources]]) -> list[tuple[str, int, int]]:
    """Find the hosts on which ranks would share GPUs: (host, ranks, GPUs). resources: (host, of a rank there)."""
    by_host: dict[str, list[Sequence[Gpu]]] = defaultdict(list)
    for host, each in resources:
        by_host[host].append(each.gpus)
    found = []
    for host, seen in by_host.items():
        alike = all(gpus == seen[0] for gpus in seen)
        if all(seen) and (alike or all(len(gpus) == 1 for gpus in seen)) and not assign_gpus(seen):
            found.append((host, len(seen), max(len(seen[0]), len({gpu for gpus in seen for gpu in gpus}))))
    return found


def check_gpus(resources: Iterable[tuple[str, HostResources]], asked_by: str | None) -> list[str]:
    """Describe where ranks would share GPUs: one text, or none.

    asked_by: what asks for one GPU a rank; then this is a LaunchError. "" for nothing, None if they may share.
    """
    shared = find_shared_gpus(resources) if asked_by is not None else []
    if not shared:
        return []
    places = "; ".join(f"{host}: {ranks} ranks, but {gpus} GPU{'s' * (gpus > 1)}" for host, ranks, gpus in shared)
    slots = ",".join(f"{host}:{gpus}" for host, _, gpus in shared)
    why = f"{asked_by} asks for one GPU a rank" if asked_by else "NCCL refuses two ranks on one GPU"
    cure = f"Start one rank a GPU (slots, as -H {slots}), or show the ranks more GPUs (CUDA_VISIBLE_DEVICES)"
    other = "" if asked_by else "; a job on CPUs can hide them: CUDA_VISIBLE_DEVICES=''"
    text = f"{places}. {why}. {cure}; tests of correctness can use --share-gpus{other}."
    if asked_by:
        raise LaunchError(text)
    return [text]
