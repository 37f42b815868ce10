"""Checks of the job: the scheduler's variables and those of a process's rank, the training script, and a small job.

The checks of the small job: it runs, its ranks are bound and share GPUs as they should, and it is as fast as the
network.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterator, Mapping

from hvdkit.errors import WorldError
from hvdkit.gpu_vendors import NVIDIA, find_vendor
from hvdkit.launch.allocations.schedulers import find_scheduler
from hvdkit.tools.doctor.checks.gpus import count_visible, read_selection
from hvdkit.tools.doctor.facts import HostFacts
from hvdkit.tools.doctor.findings import Finding, JobRequest
from hvdkit.tools.doctor.survey import Survey
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
        yield Finding.error(
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
        yield Finding.error(
            "slurm-tasks",
            f"--ntasks={tasks} and {nodes} nodes with --ntasks-per-node={each} disagree: they are {nodes * each}.",
            "Give --nodes and --ntasks-per-node, and leave --ntasks out.",
        )
    elif tasks and 0 < tasks < nodes:
        yield Finding.warning(
            "slurm-tasks",
            f"{tasks} task{'s' * (tasks > 1)} on {nodes} nodes: {nodes - tasks} would have nothing to do.",
            "Give --nodes and --ntasks-per-node; --ntasks counts those of all nodes.",
        )
    elif len(set(counts)) > 1:
        yield Finding.warning(
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
        yield Finding.warning(
            "slurm-gpus",
            f"A node has {gpus} GPUs and {here} task{'s' * (here > 1)}.{one} "
            + (f"{gpus - here} GPUs are idle." if here < gpus else "tasks share a GPU."),
            f"Give --ntasks-per-node={gpus}; --gres=gpu:N counts those of one node, not of the job.",
        )
    step = environ.get("SLURM_STEP_ID", "")
    wanted = _read_count(environ, "SLURM_CPUS_PER_TASK")
    if wanted > 1 and not step and _read_count(environ, "SRUN_CPUS_PER_TASK") != wanted:
        yield Finding.warning(
            "cpus-per-task",
            f"--cpus-per-task={wanted} is the batch script's: since Slurm 22.05 srun does not inherit it, and each "
            "task gets one core.",
            'In the batch script: export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK", or srun --cpus-per-task again.',
        )
    local = _read_count(environ, "LOCAL_WORLD_SIZE")
    beside = parse_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if step and is_torchrun(environ) and local > 1 and beside and beside[0] > 1:
        yield Finding.error(
            "torchrun-per-gpu",
            f"srun starts {beside[0]} torchruns on a node, and each of them {local} ranks: {beside[0] * local} on "
            "one node.",
            "Start torchrun once a node: srun --ntasks-per-node=1 torchrun --nproc-per-node=N.",
        )


def parse_counts(text: str) -> list[int]:
    """Turn "2(x3),1" into [2, 2, 2, 1]; [] for other text."""
    try:
        return parse_slurm_counts(text)
    except ValueError:
        return []


def _read_count(environ: Mapping[str, str], name: str) -> int:
    """Read a number; of "gpu:4" or "a100:4" the number after the last colon; 0 if there is none."""
    text = environ.get(name, "").rpartition(":")[2]
    return int(text) if text.isdecimal() else 0


def check_variables(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Check the variables of ranks and of the rendezvous."""
    environ = facts.environ
    try:
        launcher = read_world(environ).launcher
    except WorldError as error:
        yield Finding.error("launcher-variables", str(error), "Start again from a fresh shell.")
        return
    if launcher != "torchrun":
        yield from _check_rank(environ, launcher)
        yield from _check_port(facts)
    hosts = max(job.hosts, *map(_number, (environ.get("SLURM_JOB_NUM_NODES", ""), environ.get("SLURM_NNODES", ""))))
    address = environ.get("MASTER_ADDR", "")
    if hosts > 1 and _is_loopback(address):
        yield Finding.error(
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
        yield Finding.error(
            "rank-exported",
            f"RANK={rank} is set in the batch script, so it is the same for every task.",
            "Set it in the step, where each task has its own: srun bash -c 'RANK=$SLURM_PROCID python train.py'. "
            "hvdkit needs no RANK: leave it out.",
        )
    elif launcher == "none":
        yield Finding.warning(
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
        yield Finding.error(
            "master-port",
            f"MASTER_PORT={port.number} is in use on {facts.host}, perhaps by another job.",
            "Derive it from the job: export MASTER_PORT=$((10000 + ${SLURM_JOB_ID:-$$} % 20000)).",
        )
    elif port.number and "SLURM_ARRAY_TASK_ID" in environ:
        job = environ.get("SLURM_JOB_ID", "")
        if str(port.number)[-3:] != job[-3:] and port.number != 10000 + _number(job) % 20000:
            yield Finding.warning(
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


_NAMES = {"slurm": "Slurm", "pbs": "PBS", "lsf": "LSF", "sge": "SGE", "flux": "Flux", "htcondor": "HTCondor"}


def check_script(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Check the script, if the options name one."""
    script = job.script
    if script is None:
        return
    if script.problem:
        yield Finding.error(
            "script", f"{script.path} cannot be read: {script.problem}.", "Correct the path or the script."
        )
        return
    gpus = len(facts.accelerators.gpus)
    tasks = max(job.ranks, job.slots, int(_number(facts.environ.get("SLURM_NTASKS", ""))))
    if not script.distributed and (tasks > 1 or job.hosts > 1 or gpus > 1):
        many = f"{tasks} ranks" if tasks > 1 else f"{gpus} GPUs" if gpus > 1 else f"{job.hosts} hosts"
        yield Finding.warning(
            "script-not-distributed",
            f"{script.path} uses no distributed training: {many} would not share the work, they would each do all "
            "of it or nothing.",
            "Add hvdkit: import it, call hvd.init() and wrap the optimizer; or ask for one GPU.",
        )
    if script.visible_late:
        name = script.visible_variable or NVIDIA.variable
        yield Finding.error(
            "visible-devices-late",
            f"{script.path}:{script.visible_late} sets {name} after MPI or the GPU was started: it has no effect.",
            "Set it earlier, in the job script; or do not set it, and choose the device by hvd.local_rank().",
        )
    chosen = _describe_one_gpu(facts)
    if script.device_by_rank and chosen:
        yield Finding.error(
            "device-by-rank",
            f"{script.path}:{script.device_by_rank} uses the local rank as the device number, but a rank sees "
            f"one GPU here ({chosen}): all but rank 0 fail with 'invalid device ordinal'.",
            "Use device local_rank % torch.cuda.device_count(), or let every task see all GPUs of its host.",
        )
    if script.backend_mpi and facts.mpi.kind not in ("open_mpi", "") and gpus:
        yield Finding.error(
            "backend-mpi",
            f"{script.path}:{script.backend_mpi} uses torch's backend mpi with {facts.mpi.name}: torch sends GPU "
            "tensors only through an Open MPI that is built for CUDA.",
            "Use the backend nccl, or import hvdkit.torch in place of torch.distributed.",
        )
    scheduler = find_scheduler(facts.environ)
    if scheduler and not script.saves:
        name = _NAMES.get(scheduler, scheduler)  # a package's own
        yield Finding.warning(
            "no-checkpoint",
            f"{script.path} contains no call that saves a checkpoint: when {name} ends the job at its time limit, the "
            "work is lost.",
            "Save a checkpoint every few minutes, on rank 0, and load it at the start.",
        )


def _describe_one_gpu(facts: HostFacts) -> str:
    """Write the variables that show exactly one GPU to this process; "" if they show another number."""
    visible, vendor = facts.accelerators.visible, find_vendor(facts.accelerators.vendor)
    if vendor is NVIDIA:
        return f"{vendor.variable}={visible}" if visible and "," not in visible else ""
    chosen = " ".join(f"{name}={value}" for name, value in read_selection(facts).items())
    return chosen if count_visible(facts) == 1 else ""


def check_small_job(survey: Survey) -> Iterator[Finding]:
    """Check the small job, if it was run."""
    job = survey.allreduce
    if job is None:
        return
    if job.error:
        yield Finding.error(
            "job-fails",
            f"An allreduce of 16 MiB over all hosts fails: {job.error}",
            f"It works over one network alone: set {job.remedy}."
            if job.remedy
            else "Correct the other findings first; then try: hvdrun --verbose -H ... hostname",
        )
    size = len(job.ranks)
    if size > 1 and any(rank.size != size for rank in job.ranks):
        sizes = sorted({rank.size for rank in job.ranks})
        yield Finding.error(
            "singletons",
            f"{size} ranks were started, but their worlds have size {', '.join(map(str, sizes))}.",
            "The launcher and the library that mpi4py loads belong to different MPIs: run hvdkit doctor on each host.",
        )
    cores = {facts.host: len(facts.machine.cpu.allowed) for facts in survey.answering.values()}
    bound: dict[str, list[int]] = defaultdict(list)
    for rank in job.ranks:
        if rank.cores == 1 < cores.get(rank.host, 0):
            bound[rank.host].append(rank.rank)
    for host, ranks in bound.items():
        yield Finding.warning(
            "rank-one-core",
            f"The launcher binds rank {', '.join(map(str, ranks))} on {host} to one core of {cores[host]}.",
            "Unset the variable that requests binding (OMPI_MCA_hwloc_base_binding_policy, "
            "PRTE_MCA_hwloc_default_binding_policy, HYDRA_BINDING, I_MPI_PIN), or set it to none.",
            (host,),
        )
    yield from _check_gpus(survey)
    if job.slow:
        yield Finding.warning(
            "allreduce-slow",
            f"An allreduce of {job.bytes / 2**20:.0f} MiB over all hosts took {job.seconds:.2f} s; from the network's "
            f"bandwidth {job.expected_s:.2f} s are expected.",
            "MPI may use another interface: set OMPI_MCA_btl_tcp_if_include to the fast network; or the "
            "hosts are busy.",
        )


def _check_gpus(survey: Survey) -> Iterator[Finding]:
    """Find ranks of a host that use the same single GPU."""
    assert survey.allreduce is not None
    seen: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank in survey.allreduce.ranks:
        if rank.visible and "," not in rank.visible:
            seen[(rank.host, rank.visible, rank.chosen or f"{NVIDIA.variable}={rank.visible}")].append(rank.rank)
    for (host, _, chosen), ranks in seen.items():
        if len(ranks) > 1:
            yield Finding.error(
                "gpu-for-two-ranks",
                f"Ranks {', '.join(map(str, ranks))} on {host} share one GPU ({chosen}).",
                f"Unset {chosen.partition('=')[0]} where the job is started, and choose the device by "
                "hvd.local_rank().",
                (host,),
            )
