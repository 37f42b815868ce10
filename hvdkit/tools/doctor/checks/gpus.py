"""Checks of GPUs, of the variables that select them, of NCCL and its network, and of the driver's CUDA."""

from __future__ import annotations

from collections.abc import Iterator

from hvdkit.gpu_vendors import AMD, INTEL, NVIDIA, Gpu, Visible, find_vendor
from hvdkit.tools.doctor.facts import HostFacts
from hvdkit.tools.doctor.findings import Finding, JobRequest, Severity
from hvdkit.tools.doctor.survey import Survey
from hvdkit.tools.installed import parse_numbers
from hvdkit.transport.nccl.library import OLDEST

#: Major version of CUDA -> the oldest driver that runs it (CUDA compatibility guide, "minor version compatibility").
_LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
#: Vendor -> the name of its builds of torch in torch/version.py.
_TORCH = {AMD.name: "hip", INTEL.name: "xpu"}
#: This NCCL deadlocks at the start with unequal numbers of ranks on the hosts: github.com/NVIDIA/nccl/issues/2385.
_DEADLOCKS = "2.31.2"


def list_builds(facts: HostFacts) -> dict[str, str]:
    """Map each installed framework with a known build to the CUDA it was built for; "" for a build for CPUs.

    On a host with GPUs of AMD or Intel: torch only, to the HIP or XPU it was built for.
    """
    found = facts.accelerators
    torch = found.torch_other.get(_TORCH[found.vendor], "") if found.vendor in _TORCH else found.torch_cuda
    others = {} if found.vendor in _TORCH else found.cuda_of
    return {**({"torch": torch} if "torch" in facts.packages else {}), **others}


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
    used = bool(found.gpus) and found.vendor == NVIDIA.name and any(list_builds(facts).values())
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
    if not found.gpus or not driver or found.vendor != NVIDIA.name:
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
        and facts.accelerators.vendor == NVIDIA.name
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

_BUILDS = {
    NVIDIA.name: {
        "torch": "CUDA of torch see pytorch.org/get-started",
        "tensorflow": "CUDA of TensorFlow run: pip install 'tensorflow[and-cuda]'",
        "jax": "CUDA of JAX run: pip install 'jax[cuda13]'",
    },
    AMD.name: {"torch": "ROCm of torch load your site's module, or see pytorch.org/get-started"},
    INTEL.name: {"torch": "XPU of torch load your site's module, or see pytorch.org/get-started"},
}


def check_accelerators(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Check GPUs and the variables that select them."""
    found, vendor = facts.accelerators, find_vendor(facts.accelerators.vendor)
    if found.error:
        yield Finding.warning(
            "gpu-driver",
            f"The GPU driver does not answer: {found.error}.",
            "Frameworks will not find the GPUs either. Load the driver or ask your site; a login host needs no driver.",
        )
    if found.denied:
        yield Finding.warning(
            "gpu-denied",
            f"This user may not open {found.denied}: frameworks will find none of the {len(found.gpus)} GPUs.",
            "Run inside an allocation with GPUs, or ask for the groups that may (render, video).",
        )
    builds = list_builds(facts)
    without = [name for name, build in builds.items() if not build]
    if found.gpus and without and ("torch" in without or not any(builds.values())):
        yield Finding.warning(
            "gpu-unused",
            f"There are {len(found.gpus)} GPUs ({found.gpus[0].name}), but the installed {', '.join(without)} "
            f"will not use them: built for {'CPUs' if vendor is NVIDIA else 'something else'}.",
            f"For a build for {'; '.join(_BUILDS[vendor.name][name] for name in without)}.",
        )
    used = [gpu for gpu in found.gpus if 0 < _MOST_USED * gpu.memory_bytes < gpu.used_bytes]
    if used:
        places = [
            f"{gpu.used_bytes / 2**30:.0f} of {gpu.memory_bytes / 2**30:.0f} GiB of GPU {gpu.index}" for gpu in used
        ]
        yield Finding.warning(
            "gpu-in-use",
            f"Memory is in use before the job: {', '.join(places)}. Ranks there may run out of it.",
            f"{vendor.program} shows the processes. End those that an earlier job has left, or ask for GPUs of your "
            "own.",
        )
    yield from _check_visible(facts)


#: Vendor -> what its runtime does with a word that names no GPU.
_IGNORED = {
    NVIDIA.name: "CUDA ignores that one and all after it",
    AMD.name: "ROCm ignores that one and all after it",
    INTEL.name: "Level Zero skips it",
}


def _check_visible(facts: HostFacts) -> Iterator[Finding]:
    found, vendor, environ = facts.accelerators, find_vendor(facts.accelerators.vendor), read_selection(facts)
    if not environ or not found.gpus:
        return
    visible = select_gpus(facts)
    value = environ.get(visible.variable, "")
    if (
        not visible.gpus
        and (visible.invalid is None or value.strip() in ("", "-1", "NoDevFiles"))
        and (visible.repeated is None)
    ):
        yield Finding.warning(
            "gpu-hidden",
            f"{vendor.describe_selection(environ)} hides all {len(found.gpus)} GPUs.",
            "Unset it, unless the job is to run on CPUs.",
        )
    elif visible.invalid is not None:
        yield Finding.error(
            "gpu-not-there",
            f"{visible.variable}={value} names {visible.invalid!r}, and {_count_numbered(facts, visible.variable)}: "
            f"{_IGNORED[vendor.name]}.",
            "Correct it, or unset it and let the scheduler or hvdrun set it.",
        )
    elif visible.repeated is not None and visible.variable == vendor.variable:
        rest = "CUDA then shows none at all" if vendor is NVIDIA else "ROCm ignores the second and all after it"
        yield Finding.error(
            "gpu-twice", f"{visible.variable}={value} names a GPU twice: {rest}.", "Name each GPU once."
        )


def _count_numbered(facts: HostFacts, variable: str) -> str:
    """Say which GPUs the numbers in a variable count."""
    vendor, environ = find_vendor(facts.accelerators.vendor), read_selection(facts)
    count = f"this host has {len(facts.accelerators.gpus)} GPUs, numbered from 0"
    if vendor is AMD and variable != vendor.variable and vendor.variable in environ:
        left = len(vendor.select({vendor.variable: environ[vendor.variable]}, list_found(facts)).gpus)
        rest = f"GPU{'s' * (left != 1)} that {vendor.variable}={environ[vendor.variable]} leaves"
        return f"it counts the {left} {rest}, from 0"
    if vendor is INTEL and environ.get("ZE_FLAT_DEVICE_HIERARCHY") != "COMPOSITE":
        return f"{count}, a tile each; card.tile is for ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE"
    return count


def read_selection(facts: HostFacts) -> dict[str, str]:
    """Read the variables that select GPUs of this host's vendor."""
    found, vendor = facts.accelerators, find_vendor(facts.accelerators.vendor)
    if vendor is NVIDIA:
        return {} if found.visible is None else {vendor.variable: found.visible}
    return vendor.find_set(facts.environ)


def list_found(facts: HostFacts) -> list[Gpu]:
    """List the GPUs of a host as the table of vendors describes them."""
    found = sorted(facts.accelerators.gpus, key=lambda gpu: gpu.index)
    return [Gpu(gpu.index, gpu.bus, gpu.part, gpu.uuid, gpu.name, cpus=gpu.cpus) for gpu in found]


def select_gpus(facts: HostFacts) -> Visible:
    """Select the GPUs that are visible to a process on this host."""
    return find_vendor(facts.accelerators.vendor).select(read_selection(facts), list_found(facts))


def count_visible(facts: HostFacts) -> int:
    """Count the GPUs that are visible to a process on this host."""
    return len(select_gpus(facts).gpus)


def check_fabric(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Compare GPUs with ranks, and check the network that NCCL uses."""
    visible = count_visible(facts) if facts.accelerators.gpus else 0
    if 0 < visible < job.ranks_here and facts.settings.get("share_gpus") != "True":
        yield Finding(
            "error" if facts.settings.get("device_transport") == "nccl" else "warning",
            "gpu-shared",
            f"{job.ranks_here} ranks would share {visible} GPU{'s' * (visible > 1)} of {facts.host}.",
            f"{find_vendor(facts.accelerators.vendor).sharing}. Start as many ranks on a host as it has GPUs (slots, "
            "--ntasks-per-node). With --gpus-per-task or --gpu-bind each rank sees one GPU only, and it is number 0.",
        )
    elif 0 < job.ranks_here < visible:
        yield Finding.note(
            "gpu-idle",
            f"{job.ranks_here} ranks would use {job.ranks_here} of the {visible} GPUs of {facts.host}.",
            "Start one rank a GPU (slots, --ntasks-per-node), or ask for fewer GPUs.",
        )
    if visible and job.hosts > 1 and facts.accelerators.vendor != INTEL.name:
        yield from _check_nccl(facts)


def _check_nccl(facts: HostFacts) -> Iterator[Finding]:
    fabrics, environ = facts.machine.fabrics, facts.environ
    library = find_vendor(facts.accelerators.vendor).library
    devices = ", ".join(fabrics.infiniband or fabrics.slingshot)
    if not devices:
        return
    why = cure = ""
    if environ.get("NCCL_NET", "").lower() == "socket":
        why, cure = "NCCL_NET=Socket selects it", "Unset NCCL_NET."
    elif fabrics.infiniband and environ.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        why, cure = f"NCCL_IB_DISABLE={environ['NCCL_IB_DISABLE']} selects it", "Unset NCCL_IB_DISABLE."
    elif not fabrics.infiniband and not fabrics.nccl_plugins:
        why = f"there is no lib{library.lower()}-net.so in LD_LIBRARY_PATH, which {library} needs for Slingshot"
        cure = "Load your site's module for it (aws-ofi-nccl or aws-ofi-rccl); NCCL_DEBUG=INFO shows which it uses."
    if why:
        yield Finding.warning(
            "nccl-on-tcp", f"{library} will use TCP in place of {devices}: {why}. That is several times slower.", cure
        )
