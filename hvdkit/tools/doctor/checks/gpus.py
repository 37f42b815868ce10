"""Checks of GPUs, of the variables that select them, and of the network that NCCL uses."""

from __future__ import annotations

from collections.abc import Iterator

from hvdkit.tools.doctor.checks.nccl import list_builds
from hvdkit.tools.doctor.facts import Accelerators, HostFacts
from hvdkit.tools.doctor.findings import Finding, JobRequest

_CUDA_BUILDS = {
    "torch": "of torch see pytorch.org/get-started",
    "tensorflow": "of TensorFlow run: pip install 'tensorflow[and-cuda]'",
    "jax": "of JAX run: pip install 'jax[cuda13]'",
}


def check_accelerators(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Check GPUs and the variables that select them."""
    found = facts.accelerators
    if found.error:
        yield Finding(
            "warning",
            "gpu-driver",
            f"The GPU driver does not answer: {found.error}.",
            "Frameworks will not find the GPUs either. Load the driver or ask your site; a login host needs no driver.",
        )
    builds = list_builds(facts)
    without = [name for name, cuda in builds.items() if not cuda]
    if found.gpus and without and ("torch" in without or not any(builds.values())):
        yield Finding(
            "warning",
            "gpu-unused",
            f"There are {len(found.gpus)} GPUs ({found.gpus[0].name}), but the installed {', '.join(without)} "
            "will not use them: built for CPUs.",
            f"For a build for CUDA {'; '.join(_CUDA_BUILDS[name] for name in without)}.",
        )
    yield from _check_visible(found)


def _check_visible(found: Accelerators) -> Iterator[Finding]:
    if found.visible is None or not found.gpus:
        return
    words = [word.strip() for word in found.visible.split(",")]
    if words in ([""], ["-1"], ["NoDevFiles"]):
        yield Finding(
            "warning",
            "gpu-hidden",
            f"CUDA_VISIBLE_DEVICES={found.visible!r} hides all {len(found.gpus)} GPUs.",
            "Unset it, unless the job is to run on CPUs.",
        )
        return
    wrong = [word for word in words if not _exists(word, found)]
    if wrong:
        yield Finding(
            "error",
            "gpu-not-there",
            f"CUDA_VISIBLE_DEVICES={found.visible} names {', '.join(wrong)}, and this host has {len(found.gpus)} GPUs, "
            "numbered from 0: CUDA ignores that one and all after it.",
            "Correct it, or unset it and let the scheduler or hvdrun set it.",
        )
    elif len(set(words)) < len(words):
        yield Finding(
            "error",
            "gpu-twice",
            f"CUDA_VISIBLE_DEVICES={found.visible} names a GPU twice: CUDA then shows none at all.",
            "Name each GPU once.",
        )


def _exists(word: str, found: Accelerators) -> bool:
    if word.isdecimal():
        return any(gpu.index == int(word) for gpu in found.gpus)
    return word.startswith("MIG-") or any(gpu.uuid.startswith(word) for gpu in found.gpus)


def count_visible(facts: HostFacts) -> int:
    """Count the GPUs that are visible to a process on this host."""
    found = facts.accelerators
    if found.visible is None:
        return len(found.gpus)
    return len([word for word in found.visible.split(",") if word.strip() not in ("", "-1", "NoDevFiles")])


def check_fabric(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Compare GPUs with ranks, and check the network that NCCL uses."""
    visible = count_visible(facts) if facts.accelerators.gpus else 0
    if 0 < visible < job.ranks_here and facts.settings.get("share_gpus") != "True":
        yield Finding(
            "error" if facts.settings.get("device_transport") == "nccl" else "warning",
            "gpu-shared",
            f"{job.ranks_here} ranks would share {visible} GPU{'s' * (visible > 1)} of {facts.host}.",
            "NCCL refuses that. Start as many ranks on a host as it has GPUs (slots, --ntasks-per-node). "
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


def _check_nccl(facts: HostFacts) -> Iterator[Finding]:
    fabrics, environ = facts.machine.fabrics, facts.environ
    devices = ", ".join(fabrics.infiniband or fabrics.slingshot)
    if not devices:
        return
    why = cure = ""
    if environ.get("NCCL_NET", "").lower() == "socket":
        why, cure = "NCCL_NET=Socket selects it", "Unset NCCL_NET."
    elif fabrics.infiniband and environ.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        why, cure = f"NCCL_IB_DISABLE={environ['NCCL_IB_DISABLE']} selects it", "Unset NCCL_IB_DISABLE."
    elif not fabrics.infiniband and not fabrics.nccl_plugins:
        why = "there is no libnccl-net.so in LD_LIBRARY_PATH, which NCCL needs for Slingshot"
        cure = "Load your site's module for it (aws-ofi-nccl or aws-ofi-rccl); NCCL_DEBUG=INFO shows what NCCL uses."
    if why:
        yield Finding(
            "warning",
            "nccl-on-tcp",
            f"NCCL will use TCP in place of {devices}: {why}. That is several times slower.",
            cure,
        )
