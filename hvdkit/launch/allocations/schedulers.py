"""The allocations of schedulers: Slurm, PBS (Pro, OpenPBS, Torque), LSF, SGE (Grid Engine), Flux and HTCondor."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hvdkit.errors import LaunchError
from hvdkit.launch.allocations.flux import read_flux
from hvdkit.launch.allocations.htcondor import read_htcondor
from hvdkit.launch.hostfiles import FoundHosts, Host, find_hostfile, merge_hosts
from hvdkit.launch.hostfiles.grammars import count_repeats
from hvdkit.launch.hostfiles.names import is_slots
from hvdkit.launch.hostfiles.scheduler_lists import (
    SLURM_NODELISTS,
    add_slurm_counts,
    parse_lsf_pairs,
    parse_lsf_repeats,
    parse_nodelist,
)
from hvdkit.world import is_slurm_step

_SLURM_LISTS = r"SLURM_(JOB_)?NODELIST|SLURM_JOB_NODELIST_HET_GROUP_\d+"
_SLURM_MORE = "request more from Slurm with --ntasks-per-node, or set them here with --slots-per-host"
_PBS_MORE = "request more from PBS with select=...:mpiprocs=N, or set them here with --slots-per-host"
_TORQUE_MORE = "request more from Torque with -l nodes=N:ppn=M, or set them here with --slots-per-host"
_LSF_MORE = "request more from LSF with bsub -n and -R 'span[ptile=N]', or set them here with --slots-per-host"
_SGE_MORE = "request more with qsub -pe, or set them here with --slots-per-host"
_LAUNCH_HOST = re.compile(r"batch|login|launch")


@dataclass(frozen=True)
class AllocationReader:
    """Reader of a scheduler's allocation.

    name: in lower case; of its dialect of hostfiles too. variable: set in its jobs only.
    nodefile: the variable with the path of its list of hosts; "" for none.
    read: the hosts of its job, given the variables and the user's slots; None outside of its jobs.
    """

    name: str
    variable: str
    nodefile: str
    read: Callable[[Mapping[str, str], int | None], FoundHosts | None]


def find_scheduler(environ: Mapping[str, str]) -> str:
    """Name the scheduler whose job this runs in; "" for none."""
    return next((scheduler.name for scheduler in SCHEDULERS if environ.get(scheduler.variable)), "")


def find_incomplete_slurm_job(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Name the variables of a Slurm job if none lists its nodes, so that this is not in the job; else ()."""
    if "SLURM_STEP_NODELIST" in environ or any(re.fullmatch(_SLURM_LISTS, name) for name in environ):
        return ()
    return tuple(name for name in ("SLURM_JOB_ID", "SLURM_JOBID") if environ.get(name, "").strip())


def describe_incomplete_slurm_job(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Write the note about such variables; () if there are none."""
    names = " and ".join(find_incomplete_slurm_job(environ))
    note = f"{names} set, but not SLURM_JOB_NODELIST: hvdrun takes this for no Slurm job and uses this machine."
    return (note,) if names else ()


def _read_slurm(environ: Mapping[str, str], slots: int | None) -> FoundHosts | None:
    """Read the job, or the step that this is a part of."""
    job = environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID"))
    if job is None or find_incomplete_slurm_job(environ):
        return None
    step = is_slurm_step(environ)
    if step:
        _refuse_copies(environ)
    source = f"Slurm job {job}" + (f", step {environ['SLURM_STEP_ID']}" if step else "")
    try:
        hosts = merge_hosts(_read_slurm_hosts(environ, step))
    except ValueError as problem:
        raise LaunchError(
            f"{source}: {problem}. Name the hosts with -H or --hostfile, or correct the variable."
        ) from None
    if slots:
        return FoundHosts(_set_slots(hosts, slots), source, more=_SLURM_MORE, allocated=True)
    requested = step or "SLURM_NTASKS" in environ or "SLURM_NTASKS_PER_NODE" in environ
    note = (
        f"{source} was submitted without a number of tasks, so Slurm counts one for each CPU. "
        "Request --ntasks-per-node, or set the slots here with --slots-per-host."
    )
    ranks = _count_slurm_tasks(environ, hosts, step)
    return FoundHosts(hosts, source, () if requested else (note,), ranks, _SLURM_MORE, allocated=True)


def _read_slurm_hosts(environ: Mapping[str, str], step: bool) -> list[Host]:
    if step:
        return _read_slurm_group(environ, ("SLURM_STEP_NODELIST",), ("SLURM_STEP_TASKS_PER_NODE",))
    groups = environ.get("SLURM_HET_SIZE", "")
    if is_slots(groups):  # a heterogeneous job
        return [
            host
            for group in range(int(groups))
            for host in _read_slurm_group(
                environ,
                (f"SLURM_JOB_NODELIST_HET_GROUP_{group}",),
                (f"SLURM_TASKS_PER_NODE_HET_GROUP_{group}",),
            )
        ]
    return _read_slurm_group(environ, SLURM_NODELISTS, ("SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"))


def _read_slurm_group(environ: Mapping[str, str], lists: tuple[str, ...], counts: tuple[str, ...]) -> list[Host]:
    name = next((name for name in lists if name in environ), None)
    if name is None:
        raise ValueError(f"{' or '.join(lists)} is not set")
    try:
        hosts = parse_nodelist(environ[name])
    except ValueError as problem:
        raise ValueError(f"{name}: {problem}") from None
    for count in counts:
        if count in environ:
            return list(add_slurm_counts(hosts, count, environ[count]))
    tasks = environ.get("SLURM_NTASKS", "")
    if is_slots(tasks) and int(tasks) % len(hosts) == 0:
        return list(_set_slots(tuple(hosts), int(tasks) // len(hosts)))
    raise ValueError(f"{' or '.join(counts)} is not set, so the number of tasks of each host is unknown")


def _count_slurm_tasks(environ: Mapping[str, str], hosts: tuple[Host, ...], step: bool) -> int | None:
    """Count the requested tasks: with both -n and --ntasks-per-node they may be fewer than the slots."""
    tasks = environ.get("SLURM_NTASKS", "")
    if step or "SLURM_HET_SIZE" in environ or not is_slots(tasks):
        return None
    return min(int(tasks), sum(host.slots or 1 for host in hosts))


def _refuse_copies(environ: Mapping[str, str]) -> None:
    """Each of srun's tasks would start all ranks. With --pty only the first task is a shell."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1" and "SLURM_PTY_PORT" not in environ:
        raise LaunchError(
            f"srun started hvdrun {tasks} times. Start hvdrun once, without srun, in the batch script or under salloc; "
            "or start the training script itself with srun."
        )


def _read_pbs(environ: Mapping[str, str], slots: int | None) -> FoundHosts | None:
    if "PBS_NODEFILE" not in environ:
        return None
    source = f"PBS job {environ.get('PBS_JOBID', '')}".rstrip()
    more = _TORQUE_MORE if "PBS_NUM_PPN" in environ else _PBS_MORE  # which PBS Professional and OpenPBS do not set
    found = _read_nodefile("pbs", environ["PBS_NODEFILE"], source, slots, more)
    repeated = any(host.slots != 1 for host in found.hosts)
    note = f"{source}: Its nodefile lists each host once, which is one rank per host: {more}."
    return found if slots or repeated else replace(found, notes=(*found.notes, note))


def _read_sge(environ: Mapping[str, str], slots: int | None) -> FoundHosts | None:
    if "PE_HOSTFILE" not in environ:
        return None
    source = f"SGE job {environ.get('JOB_ID', '')}".rstrip()
    found = _read_nodefile("sge", environ["PE_HOSTFILE"], source, slots, _SGE_MORE)
    number = environ.get("NHOSTS", "")
    if is_slots(number) and int(number) != len(found.hosts):
        raise LaunchError(
            f"{source}: NHOSTS={number}, but its PE_HOSTFILE has {len(found.hosts)} hosts. Name the hosts with -H."
        )
    return found


def _read_lsf(environ: Mapping[str, str], slots: int | None) -> FoundHosts | None:
    job = environ.get("LSB_JOBID")
    if job is None:
        return None
    source = f"LSF job {job}"
    found = _read_lsf_variables(environ, source)
    if found is None and "LSB_DJOB_HOSTFILE" in environ:
        found = _read_nodefile("lsf", environ["LSB_DJOB_HOSTFILE"], source, None, _LSF_MORE)
    if found is None:
        raise LaunchError(
            f"{source}: none of LSB_MCPU_HOSTS, LSB_HOSTS and LSB_DJOB_HOSTFILE is set. Name the hosts with -H."
        )
    # On systems like Summit the list begins with the host of the batch script, with one slot and without GPUs.
    first, rest = found.hosts[0], found.hosts[1:]
    alone = first.slots == 1 and rest and all((host.slots or 1) > 1 for host in rest)
    if alone and ("CSM_ALLOCATION_ID" in environ or _LAUNCH_HOST.search(first.name)):
        note = f"{source}: {first.name} runs the batch script and is left out. To use it too, name all hosts with -H."
        found = replace(found, hosts=rest, notes=(note,))
    return replace(found, hosts=_set_slots(found.hosts, slots)) if slots else found


def _read_lsf_variables(environ: Mapping[str, str], source: str) -> FoundHosts | None:
    for name, parse in (("LSB_MCPU_HOSTS", parse_lsf_pairs), ("LSB_HOSTS", parse_lsf_repeats)):
        if name in environ:
            try:
                hosts = count_repeats(parse(environ[name]))
            except ValueError as problem:
                raise LaunchError(f"{source}: {name}: {problem}. Name the hosts with -H or --hostfile.") from None
            hosts = tuple(replace(host, slots=host.slots or 1) for host in hosts)
            return FoundHosts(hosts, source, more=_LSF_MORE, allocated=True)
    return None


def _read_nodefile(dialect: str, path: str, source: str, slots: int | None, more: str) -> FoundHosts:
    """Read an allocation's file. Raises HostfileError with every problem of the file."""
    found = find_hostfile(path, dialect)
    hosts = _set_slots(found.hosts, slots) if slots else found.hosts
    return replace(found, hosts=hosts, source=source, more=more, allocated=True)


def _set_slots(hosts: tuple[Host, ...], slots: int) -> tuple[Host, ...]:
    return tuple(replace(host, slots=slots) for host in hosts)


SCHEDULERS = (
    AllocationReader("slurm", "SLURM_JOB_ID", "", _read_slurm),
    AllocationReader("pbs", "PBS_JOBID", "PBS_NODEFILE", _read_pbs),
    AllocationReader("lsf", "LSB_JOBID", "LSB_DJOB_HOSTFILE", _read_lsf),
    AllocationReader("sge", "PE_HOSTFILE", "PE_HOSTFILE", _read_sge),
    AllocationReader("flux", "FLUX_URI", "", read_flux),
    AllocationReader("htcondor", "_CONDOR_PROCNO", "", read_htcondor),
)
