"""Checks of the training script, for the hosts and the scheduler of the job."""

from __future__ import annotations

from collections.abc import Iterator

from hvdkit.launch.allocations.schedulers import find_scheduler
from hvdkit.tools.doctor.facts import HostFacts
from hvdkit.tools.doctor.findings import Finding, JobRequest

_NAMES = {"slurm": "Slurm", "pbs": "PBS", "lsf": "LSF", "sge": "SGE"}


def check_script(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Check the script, if one is given."""
    script = job.script
    if script is None:
        return
    if script.problem:
        yield Finding(
            "error", "script", f"{script.path} cannot be read: {script.problem}.", "Correct the path or the script."
        )
        return
    gpus = len(facts.accelerators.gpus)
    tasks = max(job.ranks, job.slots, int(_number(facts.environ.get("SLURM_NTASKS", ""))))
    if not script.distributed and (tasks > 1 or job.hosts > 1 or gpus > 1):
        many = f"{tasks} ranks" if tasks > 1 else f"{gpus} GPUs" if gpus > 1 else f"{job.hosts} hosts"
        yield Finding(
            "warning",
            "script-not-distributed",
            f"{script.path} uses no distributed training: {many} would not share the work, they would each do all "
            "of it or nothing.",
            "Add hvdkit: import it, call hvd.init() and wrap the optimizer; or ask for one GPU.",
        )
    if script.visible_late:
        yield Finding(
            "error",
            "visible-devices-late",
            f"{script.path}:{script.visible_late} sets CUDA_VISIBLE_DEVICES after MPI or CUDA was started: it has no "
            "effect.",
            "Set it earlier, in the job script; or do not set it, and choose the device by hvd.local_rank().",
        )
    if script.device_by_rank and (facts.accelerators.visible or "").count(",") == 0 and facts.accelerators.visible:
        yield Finding(
            "error",
            "device-by-rank",
            f"{script.path}:{script.device_by_rank} uses the local rank as the device number, but a rank sees "
            f"one GPU here (CUDA_VISIBLE_DEVICES={facts.accelerators.visible}): all but rank 0 fail with 'invalid "
            "device ordinal'.",
            "Use device local_rank % torch.cuda.device_count(), or let every task see all GPUs of its host.",
        )
    if script.backend_mpi and facts.mpi.kind not in ("open_mpi", "") and gpus:
        yield Finding(
            "error",
            "backend-mpi",
            f"{script.path}:{script.backend_mpi} uses torch's backend mpi with {facts.mpi.name}: torch sends GPU "
            "tensors only through an Open MPI that is built for CUDA.",
            "Use the backend nccl, or import hvdkit.torch in place of torch.distributed.",
        )
    scheduler = find_scheduler(facts.environ)
    if scheduler and not script.saves:
        yield Finding(
            "warning",
            "no-checkpoint",
            f"{script.path} contains no call that saves a checkpoint: when {_NAMES[scheduler]} ends the job at its "
            "time limit, the work is lost.",
            "Save a checkpoint every few minutes, on rank 0, and load it at the start.",
        )


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
