"""Checks of NCCL, and of the CUDA that frameworks and NCCL need from the driver."""

from __future__ import annotations

from collections.abc import Iterator

from hvdkit.tools.build_horovod.versions import parse_numbers
from hvdkit.tools.doctor.facts import HostFacts
from hvdkit.tools.doctor.findings import Finding, JobRequest, Severity
from hvdkit.tools.doctor.survey import Survey
from hvdkit.transport.nccl.library import OLDEST

#: Major version of CUDA -> the oldest driver that runs it (CUDA compatibility guide, "minor version compatibility").
_LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
#: Deadlocks at the start with unequal numbers of ranks on the hosts: github.com/NVIDIA/nccl/issues/2385.
_DEADLOCKS = "2.31.2"


def list_builds(facts: HostFacts) -> dict[str, str]:
    """List the installed frameworks whose build is known -> the CUDA they were built for, "" for a build for CPUs."""
    torch = {"torch": facts.accelerators.torch_cuda} if "torch" in facts.packages else {}
    return {**torch, **facts.accelerators.cuda_of}


def check_nccl(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Check libnccl and its wheels."""
    found, settings = facts.accelerators, facts.settings
    if len(found.nccl_wheels) > 1:
        wheels = " and ".join(f"{name} {version}" for name, version in found.nccl_wheels.items())
        yield Finding(
            "warning",
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
    """Compare the CUDA that the driver can run with the CUDA that frameworks and NCCL were built for."""
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
        yield Finding(
            "error",
            "cuda-driver-old",
            f"The GPU driver is {found.driver}{shown}, and {text}: it will find no GPU, or fail.",
            f"Ask your site for the driver {least}, or install builds for an older CUDA.",
        )


def check_uneven_hosts(survey: Survey) -> Iterator[Finding]:
    """Find the NCCL that deadlocks with different numbers of ranks on the hosts."""
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
        yield Finding(
            "error",
            "nccl-uneven-hosts",
            f"NCCL {_DEADLOCKS} hangs at the start where hosts have different numbers of ranks: {counts} "
            "(NVIDIA/nccl#2385).",
            "Give each host as many ranks, or install another NCCL: HVDKIT_NCCL_LIBRARY names the one to load.",
            tuple(affected),
        )
