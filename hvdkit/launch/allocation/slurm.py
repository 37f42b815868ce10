"""Slurm's allocation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from hvdkit.errors import LaunchError
from hvdkit.launch.hosts.host import FoundHosts, Host, merge_hosts
from hvdkit.launch.hosts.names import is_slots
from hvdkit.launch.hosts.slurm import add_counts, parse_nodelist
from hvdkit.world import is_slurm_step

_LISTS = r"SLURM_(JOB_)?NODELIST|SLURM_JOB_NODELIST_HET_GROUP_\d+"
_MORE = "ask Slurm for more with --ntasks-per-node, or say how many here with --slots-per-host"


def read(environ: Mapping[str, str], slots: int | None = None) -> FoundHosts | None:
    """Read the hosts and tasks of a Slurm job, or of the step that this is a part of; None outside of Slurm."""

    job = environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID"))
    if job is None or find_strays(environ):
        return None
    step = is_slurm_step(environ)
    if step:
        _refuse_copies(environ)
    source = f"Slurm job {job}" + (f", step {environ['SLURM_STEP_ID']}" if step else "")
    try:
        hosts = merge_hosts(_read_hosts(environ, step))
    except ValueError as problem:
        raise LaunchError(
            f"{source}: {problem}. Say where to run with -H or --hostfile, or mend the variable."
        ) from None
    asked = step or "SLURM_NTASKS" in environ or "SLURM_NTASKS_PER_NODE" in environ
    if slots:
        return FoundHosts(_with_slots(hosts, slots), source, more=_MORE, allocated=True)
    unasked = (
        f"{source} was not asked for a number of tasks, and counts one for each CPU. "
        "Ask for --ntasks-per-node, or say how many here with --slots-per-host."
    )
    notes = () if asked else (unasked,)
    return FoundHosts(hosts, source, notes, _count_tasks(environ, hosts, step), _MORE, allocated=True)


def find_strays(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Name the variables of a job of Slurm where none lists its nodes: this is not in the job. () if one does."""
    if "SLURM_STEP_NODELIST" in environ or any(re.fullmatch(_LISTS, name) for name in environ):
        return ()
    return tuple(name for name in ("SLURM_JOB_ID", "SLURM_JOBID") if environ.get(name, "").strip())


def describe_strays(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Tell that such a job is not one; () if there is none."""
    names = " and ".join(find_strays(environ))
    note = f"{names} set, but no SLURM_JOB_NODELIST: this is not in a job; running on this machine."
    return (note,) if names else ()


def _read_hosts(environ: Mapping[str, str], step: bool) -> list[Host]:
    if step:
        return _read_group(environ, ("SLURM_STEP_NODELIST",), ("SLURM_STEP_TASKS_PER_NODE",))
    groups = environ.get("SLURM_HET_SIZE", "")
    if is_slots(groups):  # a job of several parts that were asked for separately
        return [
            host
            for group in range(int(groups))
            for host in _read_group(
                environ,
                (f"SLURM_JOB_NODELIST_HET_GROUP_{group}",),
                (f"SLURM_TASKS_PER_NODE_HET_GROUP_{group}",),
            )
        ]
    return _read_group(
        environ, ("SLURM_JOB_NODELIST", "SLURM_NODELIST"), ("SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    )


def _read_group(environ: Mapping[str, str], lists: tuple[str, ...], counts: tuple[str, ...]) -> list[Host]:
    name = next((name for name in lists if name in environ), None)
    if name is None:
        raise ValueError(f"{' or '.join(lists)} is not set")
    try:
        hosts = parse_nodelist(environ[name])
    except ValueError as problem:
        raise ValueError(f"{name}: {problem}") from None
    for count in counts:
        if count in environ:
            return list(add_counts(hosts, count, environ[count]))
    tasks = environ.get("SLURM_NTASKS", "")
    if is_slots(tasks) and int(tasks) % len(hosts) == 0:
        return [replace(host, slots=int(tasks) // len(hosts)) for host in hosts]
    raise ValueError(f"{' or '.join(counts)} is not set, so that nobody knows how many tasks each host has")


def _count_tasks(environ: Mapping[str, str], hosts: tuple[Host, ...], step: bool) -> int | None:
    """The tasks that were asked for: with -n and --ntasks-per-node both given they may be fewer than the slots."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS" if step else "SLURM_NTASKS", "")
    if step or "SLURM_HET_SIZE" in environ or not is_slots(tasks):
        return None
    return min(int(tasks), sum(host.slots or 1 for host in hosts))


def _refuse_copies(environ: Mapping[str, str]) -> None:
    """Each of these copies would start all the ranks. With --pty only the first of them is a shell."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1" and "SLURM_PTY_PORT" not in environ:
        raise LaunchError(
            f"srun has started this {tasks} times. Start hvdrun once, without srun, in the batch script or under "
            "salloc; or start the training script itself with srun."
        )


def _with_slots(hosts: tuple[Host, ...], slots: int) -> tuple[Host, ...]:
    return tuple(replace(host, slots=slots) for host in hosts)
