"""What a scheduler's variables say of the job: tasks, GPUs, cores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hvdkit.tools.doctor.facts import Facts
from hvdkit.tools.doctor.finding import Finding
from hvdkit.tools.doctor.job import Job
from hvdkit.world import parse_slurm_counts


def check_scheduler(facts: Facts, job: Job) -> Iterator[Finding]:
    """Judge the allocation that this process is in, and the ranks that are asked for."""
    environ = facts.environ
    if job.ranks > job.slots > 0:
        where = next((name for name in ("SLURM", "PBS", "LSB") if f"{name}_JOBID" in environ), "")
        cure = {
            "SLURM": "Ask for them: --ntasks, or --nodes with --ntasks-per-node, or start fewer.",
            "PBS": "Ask for them: -l select=NODES:mpiprocs=N (without mpiprocs a node has one slot), or start fewer.",
            "LSB": "Ask for them: bsub -n N, or start fewer.",
        }.get(where, "Raise slots=N in the hostfile (-H host:N) if the hosts have the cores, or start fewer.")
        yield Finding(
            "error",
            "slots",
            f"{job.ranks} ranks are asked for, and the hosts have {job.slots} slots: mpirun ends with 'not enough "
            "slots'.",
            cure,
        )
    if "SLURM_JOB_ID" in environ:
        yield from _check_slurm(environ)


def _check_slurm(environ: Mapping[str, str]) -> Iterator[Finding]:
    nodes = _number(environ, "SLURM_JOB_NUM_NODES") or _number(environ, "SLURM_NNODES")
    tasks, each = _number(environ, "SLURM_NTASKS"), _number(environ, "SLURM_NTASKS_PER_NODE")
    counts = parse_counts(environ.get("SLURM_TASKS_PER_NODE", ""))
    if tasks and each and nodes and tasks != nodes * each:
        yield Finding(
            "error",
            "slurm-tasks",
            f"--ntasks={tasks} and {nodes} nodes with --ntasks-per-node={each} disagree: they are {nodes * each}.",
            "Give --nodes and --ntasks-per-node, and leave --ntasks out.",
        )
    elif tasks and 0 < tasks < nodes:
        yield Finding(
            "warning",
            "slurm-tasks",
            f"{tasks} task{'s' * (tasks > 1)} on {nodes} nodes: {nodes - tasks} would have nothing to do.",
            "Give --nodes and --ntasks-per-node; --ntasks counts those of all nodes.",
        )
    elif len(set(counts)) > 1:
        yield Finding(
            "warning",
            "slurm-tasks",
            f"The nodes get {', '.join(map(str, counts))} tasks: --ntasks leaves it to Slurm where they go.",
            "Give --ntasks-per-node in place of --ntasks.",
        )
    gpus = _number(environ, "SLURM_GPUS_ON_NODE")
    here = each or (counts[0] if counts else 0)
    if gpus and here and gpus != here:
        one = (
            " Right for torchrun, which starts one process a GPU by itself; for srun and hvdrun" if here == 1 else " So"
        )
        yield Finding(
            "warning",
            "slurm-gpus",
            f"A node has {gpus} GPUs and {here} task{'s' * (here > 1)}.{one} "
            + (f"{gpus - here} GPUs are idle." if here < gpus else "tasks share a GPU."),
            f"Give --ntasks-per-node={gpus}; --gres=gpu:N counts those of one node, not of the job.",
        )
    step = environ.get("SLURM_STEP_ID", "")
    wanted = _number(environ, "SLURM_CPUS_PER_TASK")
    if wanted > 1 and not step and _number(environ, "SRUN_CPUS_PER_TASK") != wanted:
        yield Finding(
            "warning",
            "cpus-per-task",
            f"--cpus-per-task={wanted} is the batch script's: since Slurm 22.05 srun does not inherit it, and each "
            "task gets one core.",
            'In the batch script: export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK", or srun --cpus-per-task again.',
        )
    local = _number(environ, "LOCAL_WORLD_SIZE")
    beside = parse_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if step and "TORCHELASTIC_RUN_ID" in environ and local > 1 and beside and beside[0] > 1:
        yield Finding(
            "error",
            "torchrun-per-gpu",
            f"srun starts {beside[0]} torchruns on a node, and each of them {local} ranks: {beside[0] * local} on "
            "one node.",
            "Start torchrun once a node: srun --ntasks-per-node=1 torchrun --nproc-per-node=N.",
        )


def parse_counts(text: str) -> list[int]:
    """Turn "2(x3),1" into [2, 2, 2, 1]; [] for what is not like that."""
    try:
        return parse_slurm_counts(text)
    except ValueError:
        return []


def _number(environ: Mapping[str, str], name: str) -> int:
    """Read a number; of "gpu:4" or "a100:4" the last part; 0 if there is none."""
    text = environ.get(name, "").rpartition(":")[2]
    return int(text) if text.isdecimal() else 0
