"""GPUs for the ranks, and the fast network between them."""

from __future__ import annotations

from collections.abc import Iterator

from hvdkit.tools.doctor.facts import Facts
from hvdkit.tools.doctor.finding import Finding
from hvdkit.tools.doctor.job import Job


def count_visible(facts: Facts) -> int:
    """Count the GPUs that a process on this host sees."""
    found = facts.accelerators
    if found.visible is None:
        return len(found.gpus)
    return len([word for word in found.visible.split(",") if word.strip() not in ("", "-1", "NoDevFiles")])


def check_fabric(facts: Facts, job: Job) -> Iterator[Finding]:
    """Judge GPUs against ranks, and what NCCL would send over."""
    visible = count_visible(facts) if facts.accelerators.gpus else 0
    if 0 < visible < job.ranks_here:
        yield Finding(
            "warning",
            "gpu-shared",
            f"{job.ranks_here} ranks would share {visible} GPU{'s' * (visible > 1)} of {facts.host}.",
            "Start as many ranks on a host as it has GPUs (slots, --ntasks-per-node). "
            "With --gpus-per-task or --gpu-bind each rank sees one GPU only, and it is number 0.",
        )
    elif 0 < job.ranks_here < visible:
        yield Finding(
            "note",
            "gpu-idle",
            f"{job.ranks_here} ranks would use {job.ranks_here} of the {visible} GPUs of {facts.host}.",
            "Start one rank a GPU (slots, --ntasks-per-node), or ask for fewer GPUs.",
        )
    if visible and job.hosts > 1:
        yield from _check_nccl(facts)


def _check_nccl(facts: Facts) -> Iterator[Finding]:
    fabrics, environ = facts.machine.fabrics, facts.environ
    devices = ", ".join(fabrics.infiniband or fabrics.slingshot)
    if not devices:
        return
    why = cure = ""
    if environ.get("NCCL_NET", "").lower() == "socket":
        why, cure = "NCCL_NET=Socket says so", "Unset NCCL_NET."
    elif fabrics.infiniband and environ.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        why, cure = f"NCCL_IB_DISABLE={environ['NCCL_IB_DISABLE']} says so", "Unset NCCL_IB_DISABLE."
    elif not fabrics.infiniband and not fabrics.nccl_plugins:
        why = "there is no libnccl-net.so in LD_LIBRARY_PATH, which NCCL needs for Slingshot"
        cure = "Load your site's module for it (aws-ofi-nccl or aws-ofi-rccl); NCCL_DEBUG=INFO shows what NCCL takes."
    if why:
        yield Finding(
            "warning",
            "nccl-on-tcp",
            f"NCCL would send over TCP, not over {devices}: {why}. That is several times slower.",
            cure,
        )
