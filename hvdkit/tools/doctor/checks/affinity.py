"""Checks of cores near GPUs where hvdrun does not bind ranks: under plain srun and under PALS."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hvdkit.errors import WorldError
from hvdkit.gpu_vendors import SLURM_NUMBERS, find_vendor, knows_order
from hvdkit.launch.agent.host_info import format_cpus, parse_cpus
from hvdkit.tools.doctor.checks.gpus import list_found, select_gpus
from hvdkit.tools.doctor.facts import Gpu, HostFacts
from hvdkit.tools.doctor.findings import Finding, JobRequest
from hvdkit.world import read_world, under_agent

_LAUNCHERS = ("slurm", "pals")


def check_gpu_order(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Find hosts whose GPUs come in another order than the cores near them, where srun or PALS could start ranks."""
    gpus = _list_visible(facts)
    if len(gpus) < 2 or not all(gpu.cpus for gpu in gpus) or not _has_launcher(facts):
        return
    first = [min(parse_cpus(gpu.cpus), default=0) for gpu in gpus]
    if first == sorted(first):
        return
    places = ", ".join(f"{gpu.index} near {gpu.cpus}" for gpu in gpus)
    yield Finding.note(
        "gpu-order",
        f"GPUs are not in the order of the cores near them: {places}. srun and PALS give rank 0 the first cores, far "
        "from GPU 0.",
        f"hvdrun binds ranks near their GPUs. For ranks that use the GPU of their local rank: {_plan_binding(facts)}",
    )


def check_task(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Find that this process, a rank of srun or PALS, has cores far from the GPU that its local rank selects."""
    local_rank = _find_local_rank(facts)
    gpus = _list_visible(facts)
    if local_rank is None or not gpus:
        return
    own = gpus[0] if len(gpus) == 1 else gpus[local_rank] if local_rank < len(gpus) else None
    if own is None or not own.cpus:
        return
    near, allowed = set(parse_cpus(own.cpus)), set(facts.machine.cpu.allowed)
    if not allowed or allowed <= near:
        return
    cores = f"CPUs {format_cpus(allowed)}, and GPU {own.index} ({own.bus}), which it uses, is near {own.cpus}"
    if allowed & near:
        yield Finding.note(
            "gpu-far", f"Local rank {local_rank} may run on {cores}: some are far from it.", _plan_binding(facts)
        )
    else:
        yield Finding.warning(
            "gpu-far",
            f"Local rank {local_rank} runs on {cores}: all its copies to the GPU cross the processor.",
            _plan_binding(facts),
        )


def _list_visible(facts: HostFacts) -> list[Gpu]:
    """List the visible GPUs in the runtime's order; [] if it is unknown which they are.

    It is known where all GPUs of the host are visible, even if Slurm has numbered them.
    """
    known = {gpu.index: gpu for gpu in facts.accelerators.gpus}
    seen = select_gpus(facts).gpus
    vendor = find_vendor(facts.accelerators.vendor)
    hidden = SLURM_NUMBERS if len(seen) == len(known) else ()
    environ = {name: value for name, value in facts.environ.items() if name not in hidden}
    if None in seen or not knows_order(vendor, list_found(facts), environ):
        return []
    return [known[gpu.number] for gpu in seen if gpu is not None]


def _has_launcher(facts: HostFacts) -> bool:
    return "SLURM_JOB_ID" in facts.environ or any(launcher.kind == "pals" for launcher in facts.launchers)


def _find_local_rank(facts: HostFacts) -> int | None:
    try:
        world = read_world(facts.environ)
    except WorldError:
        return None  # check_variables() finds it
    plain = world.launcher in _LAUNCHERS and world.size > 1 and not under_agent(facts.environ)
    return world.local_rank if plain else None


def _plan_binding(facts: HostFacts) -> str:
    """Write the options that bind the ranks of a host, one for each GPU, near their GPUs.

    CPUs that a job may not use, as the first ones of Frontier and LUMI, are left out where this process has the others.
    """
    shares = [parse_cpus(gpu.share) for gpu in _list_visible(facts)]
    usable = [[cpu for cpu in share if cpu in facts.machine.cpu.allowed] for share in shares]
    shares = usable if all(usable) else shares
    if "SLURM_JOB_ID" in facts.environ:
        masks = ",".join(format_masks(shares)) if len(shares) > 1 and all(shares) else ""
        listed = f"; or, where each task sees all GPUs, srun --cpu-bind=mask_cpu:{masks}" if masks else ""
        return f"srun --gpus-per-task=1 --gpu-bind=closest{listed}."
    if len(shares) > 1 and all(shares):
        listed = ":".join(map(format_cpus, shares))
        return f"mpiexec --cpu-bind list:{listed}."
    return (
        "Bind each rank to the cores near its GPU: mpiexec --cpu-bind list:CPUS:CPUS:..., in the order of local ranks."
    )


def format_masks(shares: Iterable[Sequence[int]]) -> Iterator[str]:
    """Write the CPUs of each rank as a hexadecimal mask."""
    for share in shares:
        yield f"0x{sum(1 << cpu for cpu in share):x}"
