"""Checks of GPUs, of the variables that select them, of NCCL and its network, and of the driver's CUDA."""

from __future__ import annotations

from collections.abc import Iterator

from hvdkit.tools.doctor.facts import Accelerators, HostFacts
from hvdkit.tools.doctor.findings import Finding, JobRequest, Severity
from hvdkit.tools.doctor.survey import Survey
from hvdkit.tools.installed import parse_numbers
from hvdkit.transport.nccl.library import OLDEST
from hvdkit.visible_gpus import read_visible

#: Major version of CUDA -> the oldest driver that runs it (CUDA compatibility guide, "minor version compatibility").
_LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
#: This NCCL deadlocks at the start with unequal numbers of ranks on the hosts: github.com/NVIDIA/nccl/issues/2385.
_DEADLOCKS = "2.31.2"


def list_builds(facts: HostFacts) -> dict[str, str]:
    """Map each installed framework with a known build to the CUDA it was built for; "" for a build for CPUs."""
    torch = {"torch": facts.accelerators.torch_cuda} if "torch" in facts.packages else {}
    return {**torch, **facts.accelerators.cuda_of}


def check_nccl(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Check libnccl and its wheels."""
    found, settings = facts.accelerators, facts.settings
    if len(found.nccl_wheels) > 1:
        wheels = " and ".join(f"{name} {version}" for name, version in found.nccl_wheels.items())
        yield Finding.warning(
            "nccl-twice",
            f"{wheels} are both installed: they have the same files, and those of the one installed last are there.",
            "Use an environment each for frameworks with CUDA 12 and with CUDA 13. Here, run: pip uninstall -y "
            f"{' '.join(found.nccl_wheels)}; then pip install --force-reinstall the one that your framework needs.",
        )
    wanted = settings.get("device_transport") == "nccl"
    used = bool(found.gpus) and any(list_builds(facts).values())
    severity: Severity = "error" if wanted else "warning"
    if found.nccl_error and (used or wanted or settings.get("nccl_library")):
        yield Finding(
            severity,
            "nccl-missing",
            f"NCCL cannot be loaded: {found.nccl_error}.",
            "Unset HVDKIT_NCCL_LIBRARY, or set it to the path of libnccl.so.2."
            if settings.get("nccl_library")
            else "Run: pip install nvidia-nccl-cu13 (nvidia-nccl-cu12 for CUDA 12), or set HVDKIT_NCCL_LIBRARY to its "
            "path. Without it gradients go through host memory.",
        )
    elif (used or wanted) and found.nccl and parse_numbers(found.nccl) < OLDEST:
        yield Finding(
            severity,
            "nccl-old",
            f"NCCL {found.nccl} ({found.nccl_path}) is older than {'.'.join(map(str, OLDEST))}, which hvdkit needs.",
            "Install a newer one, or set HVDKIT_NCCL_LIBRARY to the path of one. Without it gradients go through host "
            "memory.",
        )


def check_driver(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Compare the CUDA that the driver can run with the CUDA of the frameworks' and NCCL's builds."""
    found = facts.accelerators
    needs = {f"{name} {facts.packages.get(name, '')}".strip(): cuda for name, cuda in list_builds(facts).items()}
    needs |= {name: name.rpartition("cu")[2] for name in found.nccl_wheels}
    majors = {name: parse_numbers(cuda)[0] for name, cuda in needs.items() if parse_numbers(cuda)}
    driver, runs = parse_numbers(found.driver), parse_numbers(found.driver_cuda)
    if not found.gpus or not driver:
        return
    old = {
        name: major
        for name, major in majors.items()
        if (major > runs[0] if runs else driver[0] < _LEAST_DRIVER.get(major, 0))
    }
    if old:
        newest = max(old.values())
        least = f"{_LEAST_DRIVER[newest]} or later" if newest in _LEAST_DRIVER else f"one for CUDA {newest}"
        text = ", ".join(f"{name} needs CUDA {major}" for name, major in old.items())
        shown = f", which runs CUDA up to {found.driver_cuda}" if runs else ""
        yield Finding.error(
            "cuda-driver-old",
            f"The GPU driver is {found.driver}{shown}, and {text}: it will find no GPU, or fail.",
            f"Ask your site for the driver {least}, or install builds for an older CUDA.",
        )


def check_uneven_hosts(survey: Survey) -> Iterator[Finding]:
    """Find the NCCL version that deadlocks with different numbers of ranks on the hosts."""
    slots = {host.name: host.slots for host in survey.hosts if host.slots}
    affected = [
        name
        for name, facts in survey.answering.items()
        if facts.accelerators.nccl == _DEADLOCKS
        and facts.accelerators.gpus
        and facts.settings.get("device_transport") != "host"
    ]
    if affected and len(set(slots.values())) > 1:
        counts = ", ".join(f"{count} on {name}" for name, count in slots.items())
        yield Finding.error(
            "nccl-uneven-hosts",
            f"NCCL {_DEADLOCKS} hangs at the start where hosts have different numbers of ranks: {counts} "
            "(NVIDIA/nccl#2385).",
            "Give each host as many ranks, or install another NCCL: HVDKIT_NCCL_LIBRARY names the one to load.",
            tuple(affected),
        )


_MOST_USED = 0.1  # fraction of a GPU's memory; a desktop or the driver itself may use some

_CUDA_BUILDS = {
    "torch": "of torch see pytorch.org/get-started",
    "tensorflow": "of TensorFlow run: pip install 'tensorflow[and-cuda]'",
    "jax": "of JAX run: pip install 'jax[cuda13]'",
}


def check_accelerators(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Check GPUs and the variables that select them."""
    found = facts.accelerators
    if found.error:
        yield Finding.warning(
            "gpu-driver",
            f"The GPU driver does not answer: {found.error}.",
            "Frameworks will not find the GPUs either. Load the driver or ask your site; a login host needs no driver.",
        )
    builds = list_builds(facts)
    without = [name for name, cuda in builds.items() if not cuda]
    if found.gpus and without and ("torch" in without or not any(builds.values())):
        yield Finding.warning(
            "gpu-unused",
            f"There are {len(found.gpus)} GPUs ({found.gpus[0].name}), but the installed {', '.join(without)} "
            "will not use them: built for CPUs.",
            f"For a build for CUDA {'; '.join(_CUDA_BUILDS[name] for name in without)}.",
        )
    used = [gpu for gpu in found.gpus if 0 < _MOST_USED * gpu.memory_bytes < gpu.used_bytes]
    if used:
        places = [
            f"{gpu.used_bytes / 2**30:.0f} of {gpu.memory_bytes / 2**30:.0f} GiB of GPU {gpu.index}" for gpu in used
        ]
        yield Finding.warning(
            "gpu-in-use",
            f"Memory is in use before the job: {', '.join(places)}. Ranks there may run out of it.",
            "nvidia-smi shows the processes. End those that an earlier job has left, or ask for GPUs of your own.",
        )
    yield from _check_visible(found)


def _check_visible(found: Accelerators) -> Iterator[Finding]:
    if found.visible is None or not found.gpus:
        return
    words = [word.strip() for word in found.visible.split(",")]
    if words in ([""], ["-1"], ["NoDevFiles"]):
        yield Finding.warning(
            "gpu-hidden",
            f"CUDA_VISIBLE_DEVICES={found.visible!r} hides all {len(found.gpus)} GPUs.",
            "Unset it, unless the job is to run on CPUs.",
        )
        return
    visible = read_visible(found.visible, _list_uuids(found))
    if visible.invalid is not None:
        yield Finding.error(
            "gpu-not-there",
            f"CUDA_VISIBLE_DEVICES={found.visible} names {visible.invalid!r}, and this host has {len(found.gpus)} "
            "GPUs, numbered from 0: CUDA ignores that one and all after it.",
            "Correct it, or unset it and let the scheduler or hvdrun set it.",
        )
    elif visible.repeated is not None:
        yield Finding.error(
            "gpu-twice",
            f"CUDA_VISIBLE_DEVICES={found.visible} names a GPU twice: CUDA then shows none at all.",
            "Name each GPU once.",
        )


def _list_uuids(found: Accelerators) -> list[str]:
    return [gpu.uuid for gpu in sorted(found.gpus, key=lambda gpu: gpu.index)]


def count_visible(facts: HostFacts) -> int:
    """Count the GPUs that are visible to a process on this host."""
    return len(read_visible(facts.accelerators.visible, _list_uuids(facts.accelerators)).gpus)


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
        yield Finding.note(
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
        yield Finding.warning(
            "nccl-on-tcp", f"NCCL will use TCP in place of {devices}: {why}. That is several times slower.", cure
        )
