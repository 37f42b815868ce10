"""Checks of the scheduler's variables and of those that give a process its rank."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping

from hvdkit.errors import WorldError
from hvdkit.tools.doctor.facts import HostFacts
from hvdkit.tools.doctor.findings import Finding, JobRequest
from hvdkit.world import is_torchrun, parse_slurm_counts, read_world


def check_scheduler(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Check the allocation of this process, and the number of ranks."""
    environ = facts.environ
    if job.ranks > job.slots > 0:
        where = next((name for name in ("SLURM", "PBS", "LSB") if f"{name}_JOBID" in environ), "")
        cure = {
            "SLURM": "Request them: --ntasks, or --nodes with --ntasks-per-node, or start fewer.",
            "PBS": "Request them: -l select=NODES:mpiprocs=N (without mpiprocs a node has one slot), or start fewer.",
            "LSB": "Request them: bsub -n N, or start fewer.",
        }.get(where, "Raise slots=N in the hostfile (-H host:N) if the hosts have the cores, or start fewer.")
        yield Finding(
            "error",
            "slots",
            f"{job.ranks} ranks are requested, but the hosts have {job.slots} slots: mpirun ends with 'not enough "
            "slots'.",
            cure,
        )
    if "SLURM_JOB_ID" in environ:
        yield from _check_slurm(environ)


def _check_slurm(environ: Mapping[str, str]) -> Iterator[Finding]:
    nodes = _read_count(environ, "SLURM_JOB_NUM_NODES") or _read_count(environ, "SLURM_NNODES")
    tasks, each = _read_count(environ, "SLURM_NTASKS"), _read_count(environ, "SLURM_NTASKS_PER_NODE")
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
    gpus = _read_count(environ, "SLURM_GPUS_ON_NODE")
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
    wanted = _read_count(environ, "SLURM_CPUS_PER_TASK")
    if wanted > 1 and not step and _read_count(environ, "SRUN_CPUS_PER_TASK") != wanted:
        yield Finding(
            "warning",
            "cpus-per-task",
            f"--cpus-per-task={wanted} is the batch script's: since Slurm 22.05 srun does not inherit it, and each "
            "task gets one core.",
            'In the batch script: export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK", or srun --cpus-per-task again.',
        )
    local = _read_count(environ, "LOCAL_WORLD_SIZE")
    beside = parse_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if step and is_torchrun(environ) and local > 1 and beside and beside[0] > 1:
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


def _read_count(environ: Mapping[str, str], name: str) -> int:
    """Read a number; of "gpu:4" or "a100:4" the last part; 0 if there is none."""
    text = environ.get(name, "").rpartition(":")[2]
    return int(text) if text.isdecimal() else 0


def check_variables(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Check the variables of ranks and of the rendezvous."""
    environ = facts.environ
    try:
        launcher = read_world(environ).launcher
    except WorldError as error:
        yield Finding("error", "launcher-variables", str(error), "Start again from a fresh shell.")
        return
    if launcher != "torchrun":
        yield from _check_rank(environ, launcher)
        yield from _check_port(facts)
    hosts = max(job.hosts, *map(_number, (environ.get("SLURM_JOB_NUM_NODES", ""), environ.get("SLURM_NNODES", ""))))
    address = environ.get("MASTER_ADDR", "")
    if hosts > 1 and _is_loopback(address):
        yield Finding(
            "error",
            "master-address",
            f"MASTER_ADDR={address} is a loopback address, but there are {hosts} hosts: they cannot reach one another.",
            'Set it to the first host\'s name: export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | '
            "head -n1).",
        )


def _check_rank(environ: Mapping[str, str], launcher: str) -> Iterator[Finding]:
    rank = environ.get("RANK", "")
    if not rank:
        return
    slurm = environ.get("SLURM_PROCID", "") if launcher == "slurm" else ""
    if "SLURM_JOB_ID" in environ and (launcher == "none" or (slurm and slurm != rank)):
        yield Finding(
            "error",
            "rank-exported",
            f"RANK={rank} is set in the batch script, so it is the same for every task.",
            "Set it in the step, where each task has its own: srun bash -c 'RANK=$SLURM_PROCID python train.py'. "
            "hvdkit needs no RANK: leave it out.",
        )
    elif launcher == "none":
        yield Finding(
            "warning",
            "rank-exported",
            f"RANK={rank} is set, but no launcher has started this process: torch.distributed would use it.",
            "Run: unset RANK WORLD_SIZE LOCAL_RANK",
        )


def _check_port(facts: HostFacts) -> Iterator[Finding]:
    environ, port = facts.environ, facts.machine.port
    own = environ.get("MASTER_ADDR", "") in ("", facts.host, *facts.machine.network.addresses) or _is_loopback(
        environ.get("MASTER_ADDR", "")
    )
    if not port.free and own:
        yield Finding(
            "error",
            "master-port",
            f"MASTER_PORT={port.number} is in use on {facts.host}, perhaps by another job.",
            "Derive it from the job: export MASTER_PORT=$((10000 + ${SLURM_JOB_ID:-$$} % 20000)).",
        )
    elif port.number and "SLURM_ARRAY_TASK_ID" in environ:
        job = environ.get("SLURM_JOB_ID", "")
        if str(port.number)[-3:] != job[-3:] and port.number != 10000 + _number(job) % 20000:
            yield Finding(
                "warning",
                "master-port",
                f"MASTER_PORT={port.number} looks the same for all tasks of this job array: two on one host would "
                "collide.",
                "Derive it from the job: export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)).",
            )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
