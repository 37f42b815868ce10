"""The allocations of schedulers: Slurm, PBS (Pro, OpenPBS, Torque), LSF, SGE (Grid Engine), Flux and HTCondor.

Packages add schedulers by entry points of the group hvdkit.allocations, see `list_schedulers`.

Flux sets no variable that lists hosts (flux-environment(7)), so its command prints R, the resource set (Flux RFC 20,
version 1): that of the instance in a batch script or a shell of `flux alloc`, that of the job in a job.
HTCondor's sshd.sh, which openmpiscript and mp2script source, starts an sshd on each node of the parallel universe and
writes a line for it to a contact file on node 0: the node's number, its host, the port, and more.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdkit.entry_points import load_entry_points
from hvdkit.errors import LaunchError
from hvdkit.launch.hostfiles import FoundHosts, Host, complete_slots, find_hostfile, merge_hosts
from hvdkit.launch.hostfiles.grammars import (
    SLURM_NODELISTS,
    add_slurm_counts,
    count_repeats,
    parse_lsf_pairs,
    parse_lsf_repeats,
    parse_nodelist,
)
from hvdkit.launch.hostfiles.names import MOST_HOSTS, check_name, is_slots, set_slots
from hvdkit.launch.process import run_program
from hvdkit.ranges import read_ranges
from hvdkit.world import is_slurm_step

#: Group of entry points, `NAME = module:READER`: an AllocationReader with this name.
ENTRY_POINTS = "hvdkit.allocations"

#: How to get more slots from any allocation; see FoundHosts.more_slots_hint.
SET_SLOTS = "set them here with --slots-per-host"
_FLUX_TIMEOUT_S = 20.0


def read_flux(environ: Mapping[str, str]) -> FoundHosts | None:
    """Read the resources of this job, else of this instance; None without FLUX_URI.

    A host has a slot for each of its GPUs, else for each of its cores. Raises LaunchError.
    """
    if "FLUX_URI" not in environ:
        return None
    tasks, job = environ.get("FLUX_JOB_SIZE", "1"), environ.get("FLUX_JOB_ID", "")
    if job and tasks != "1":
        raise LaunchError(
            f"flux run started hvdrun {tasks} times. Start hvdrun once, in a script of flux batch or a shell of flux "
            "alloc; or start the training script itself with flux run.",
            code="started-by-flux-run",
        )
    source = f"Flux job {job}" if job else "the Flux instance"
    program = shutil.which("flux", path=environ.get("PATH", os.defpath))
    if program is None:
        raise LaunchError(
            "FLUX_URI is set, but flux is not on PATH. Add it to PATH, or name the hosts with -H.", code="flux-missing"
        )
    words = ("job", "info", job, "R") if job else ("resource", "R")
    result = run_program([program, *words], environ=environ, timeout_s=_FLUX_TIMEOUT_S)
    command = f"flux {' '.join(words)}"
    if result.status != 0:
        raise LaunchError(
            f"{command}: {result.ending}: {result.output.strip()[-300:]}. Check FLUX_URI, or name the hosts with -H.",
            code="flux-failed",
        )
    try:
        hosts = parse_resources(result.stdout)
    except ValueError as problem:
        raise LaunchError(f"{command}: {problem}. Name the hosts with -H.", code="flux-output") from None
    counted = "GPU" if any("gpu" in children for _, children in _list_children(json.loads(result.stdout))) else "core"
    note = f"{source}: a host has a slot for each {counted}. Set another number of ranks with --slots-per-host."
    return FoundHosts(
        hosts, source, slots_hint=note, more_slots_hint="request more with flux alloc or flux batch (-N, -n, -c)"
    )


def parse_resources(text: str) -> tuple[Host, ...]:
    """Parse R in JSON into its hosts, in the order of Flux's ranks. Raises ValueError with the problem."""
    try:
        resources = json.loads(text)
        names = [host.name for part in resources["execution"]["nodelist"] for host in parse_nodelist(part)]
        children = dict(_list_children(resources))
        if len(children) != len(names):
            raise ValueError(f"it has resources of {len(children)} ranks, and {len(names)} hosts")
        counts = [
            len(parse_idset(own.get("gpu", ""))) or len(parse_idset(own["core"])) or 1
            for _, own in sorted(children.items())
        ]
    except (KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise ValueError(f"{text[:200]!r} is not a resource set of version 1 ({problem})") from None
    if not names:
        raise ValueError("it has no hosts")
    return tuple(Host(name, count) for name, count in zip(names, counts, strict=True))


def _list_children(resources: Any) -> Iterator[tuple[int, Mapping[str, str]]]:
    for entry in resources["execution"]["R_lite"]:
        for rank in parse_idset(entry["rank"]):
            yield rank, entry["children"]


def parse_idset(text: str) -> list[int]:
    """Parse numbers and ranges like 0-3,7 (Flux RFC 22); brackets may stand around them. Raises ValueError."""
    inside = text.removeprefix("[").removesuffix("]").strip(",")
    try:
        return read_ranges(inside, MOST_HOSTS) if inside else []
    except ValueError:
        raise ValueError(f"{text[:100]!r} is not a list of numbers like 0-3,7") from None


def read_htcondor(environ: Mapping[str, str]) -> FoundHosts | None:
    """Read the contact file, with a slot for each node; None outside of the parallel universe.

    Raises LaunchError on a node other than 0, and without a contact file if the job has more than one node.
    """
    node, nodes = environ.get("_CONDOR_PROCNO"), environ.get("_CONDOR_NPROCS", "1")
    if node is None or nodes == "1":
        return None
    if node != "0":
        raise LaunchError(
            f"HTCondor has started this on each of {nodes} nodes, and this is node {node}. Start hvdrun on node 0 "
            "only, as openmpiscript does with mpirun.",
            code="htcondor-not-first-node",
        )
    path = environ.get("CONDOR_CONTACT_FILE") or f"{environ.get('_CONDOR_SCRATCH_DIR', '.')}/contact"
    try:
        text = Path(path).read_text(errors="replace")
    except (OSError, ValueError) as problem:  # ValueError: a null byte in the name
        raise LaunchError(
            f"HTCondor's contact file {path!r} cannot be read: {problem}. Source sshd.sh of HTCondor's libexec "
            "before hvdrun, or name the hosts with -H.",
            code="htcondor-contact-file",
        ) from None
    hosts = _parse_contacts(text, path)
    return FoundHosts(hosts, f"HTCondor's {path}", more_slots_hint="request more with machine_count")


def _parse_contacts(text: str, path: str) -> tuple[Host, ...]:
    hosts: dict[int, Host] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        try:
            if len(words) < 2 or not (words[0].isascii() and words[0].isdecimal()):
                raise ValueError(f"{line[:100]!r} does not begin with the number of a node and its host")
            hosts[int(words[0])] = Host(check_name(words[1]))
        except ValueError as problem:
            raise LaunchError(f"{path}:{number}: {problem}. Name the hosts with -H.", code="htcondor-contact") from None
    if not hosts:
        raise LaunchError(
            f"{path} is empty: no sshd of HTCondor has started. Name the hosts with -H.", code="htcondor-no-contacts"
        )
    return merge_hosts(hosts[node] for node in sorted(hosts))


_SLURM_LISTS = r"SLURM_(JOB_)?NODELIST|SLURM_JOB_NODELIST_HET_GROUP_\d+"
_LSF_MORE = "request more from LSF with bsub -n and -R 'span[ptile=N]'"
_LAUNCH_HOST = re.compile(r"batch|login|launch")


@dataclass(frozen=True)
class AllocationReader:
    """Reader of a scheduler's allocation.

    name: of the scheduler in lower case, and of its dialect of hostfiles if hvdkit has one.
    variable: a variable that is set only in its jobs.
    nodefile: the variable with the path of its list of hosts; "" for none.
    read: reads the hosts of its job with their slots; None outside of its jobs.
    """

    name: str
    variable: str
    nodefile: str
    read: Callable[[Mapping[str, str]], FoundHosts | None]


def find_scheduler(environ: Mapping[str, str]) -> str:
    """Name the scheduler of the job that this runs in; "" for none."""
    return next((scheduler.name for scheduler in list_schedulers() if environ.get(scheduler.variable)), "")


def find_incomplete_slurm_job(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Name Slurm's variables if none of them lists nodes, which means that this is not in the job; else ()."""
    if "SLURM_STEP_NODELIST" in environ or any(re.fullmatch(_SLURM_LISTS, name) for name in environ):
        return ()
    return tuple(name for name in ("SLURM_JOB_ID", "SLURM_JOBID") if environ.get(name, "").strip())


def describe_incomplete_slurm_job(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Write the note about such variables; () without such variables."""
    names = " and ".join(find_incomplete_slurm_job(environ))
    note = f"{names} set, but not SLURM_JOB_NODELIST: hvdrun takes this for no Slurm job and uses this machine."
    return (note,) if names else ()


def _read_slurm(environ: Mapping[str, str]) -> FoundHosts | None:
    """Read the hosts of the job, or of the step that this runs in."""
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
            f"{source}: {problem}. Name the hosts with -H or --hostfile, or correct the variable.", code="slurm-hosts"
        ) from None
    requested = step or "SLURM_NTASKS" in environ or "SLURM_NTASKS_PER_NODE" in environ
    note = (
        f"{source} was submitted without a number of tasks, so Slurm counts one for each CPU. "
        "Request --ntasks-per-node, or set the slots here with --slots-per-host."
    )
    ranks, more_slots_hint = _count_slurm_tasks(environ, hosts, step), "request more from Slurm with --ntasks-per-node"
    return FoundHosts(hosts, source, slots_hint="" if requested else note, ranks=ranks, more_slots_hint=more_slots_hint)


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
        return list(set_slots(hosts, int(tasks) // len(hosts)))
    raise ValueError(f"{' or '.join(counts)} is not set, so the number of tasks of each host is unknown")


def _count_slurm_tasks(environ: Mapping[str, str], hosts: tuple[Host, ...], step: bool) -> int | None:
    """Count the requested tasks: with both -n and --ntasks-per-node they may be fewer than the slots."""
    tasks = environ.get("SLURM_NTASKS", "")
    if step or "SLURM_HET_SIZE" in environ or not is_slots(tasks):
        return None
    return min(int(tasks), sum(host.slots or 1 for host in hosts))


def _refuse_copies(environ: Mapping[str, str]) -> None:
    """Raise LaunchError in srun's tasks, each of which would start all ranks. With --pty only the first is a shell."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1" and "SLURM_PTY_PORT" not in environ:
        raise LaunchError(
            f"srun started hvdrun {tasks} times. Start hvdrun once, without srun, in the batch script or under salloc; "
            "or start the training script itself with srun.",
            code="started-by-srun",
        )


def _read_pbs(environ: Mapping[str, str]) -> FoundHosts | None:
    if "PBS_NODEFILE" not in environ:
        return None
    source = f"PBS job {environ.get('PBS_JOBID', '')}".rstrip()
    more_slots_hint = "request more from PBS with select=...:mpiprocs=N"
    if "PBS_NUM_PPN" in environ:  # which PBS Professional and OpenPBS do not set
        more_slots_hint = "request more from Torque with -l nodes=N:ppn=M"
    found = find_hostfile(environ["PBS_NODEFILE"], "pbs")
    note = (
        f"{source}: Its nodefile lists each host once, which is one rank per host: {more_slots_hint}, or {SET_SLOTS}."
    )
    repeated = any(host.slots != 1 for host in found.hosts)
    return replace(found, source=source, slots_hint="" if repeated else note, more_slots_hint=more_slots_hint)


def _read_sge(environ: Mapping[str, str]) -> FoundHosts | None:
    if "PE_HOSTFILE" not in environ:
        return None
    source = f"SGE job {environ.get('JOB_ID', '')}".rstrip()
    found = find_hostfile(environ["PE_HOSTFILE"], "sge")
    number = environ.get("NHOSTS", "")
    if is_slots(number) and int(number) != len(found.hosts):
        raise LaunchError(
            f"{source}: NHOSTS={number}, but its PE_HOSTFILE has {len(found.hosts)} hosts. Name the hosts with -H.",
            code="sge-hosts-differ",
        )
    return replace(found, source=source, more_slots_hint="request more with qsub -pe")


def _read_lsf(environ: Mapping[str, str]) -> FoundHosts | None:
    job = environ.get("LSB_JOBID")
    if job is None:
        return None
    source = f"LSF job {job}"
    found = _read_lsf_variables(environ, source)
    if found is None and "LSB_DJOB_HOSTFILE" in environ:
        found = replace(find_hostfile(environ["LSB_DJOB_HOSTFILE"], "lsf"), source=source, more_slots_hint=_LSF_MORE)
    if found is None:
        raise LaunchError(
            f"{source}: none of LSB_MCPU_HOSTS, LSB_HOSTS and LSB_DJOB_HOSTFILE is set. Name the hosts with -H.",
            code="lsf-no-hosts",
        )
    # On systems like Summit the list begins with the host of the batch script, with one slot and without GPUs.
    first, rest = found.hosts[0], found.hosts[1:]
    alone = first.slots == 1 and rest and all((host.slots or 1) > 1 for host in rest)
    if alone and ("CSM_ALLOCATION_ID" in environ or _LAUNCH_HOST.search(first.name)):
        note = f"{source}: {first.name} runs the batch script and is left out. To use it too, name all hosts with -H."
        found = replace(found, hosts=rest, notes=(note,))
    return found


def _read_lsf_variables(environ: Mapping[str, str], source: str) -> FoundHosts | None:
    for name, parse in (("LSB_MCPU_HOSTS", parse_lsf_pairs), ("LSB_HOSTS", parse_lsf_repeats)):
        if name in environ:
            try:
                hosts = count_repeats(parse(environ[name]))
            except ValueError as problem:
                raise LaunchError(
                    f"{source}: {name}: {problem}. Name the hosts with -H or --hostfile.", code="lsf-hosts"
                ) from None
            return FoundHosts(complete_slots(hosts, 1), source, more_slots_hint=_LSF_MORE)
    return None


SCHEDULERS = (
    AllocationReader("slurm", "SLURM_JOB_ID", "", _read_slurm),
    AllocationReader("pbs", "PBS_JOBID", "PBS_NODEFILE", _read_pbs),
    AllocationReader("lsf", "LSB_JOBID", "LSB_DJOB_HOSTFILE", _read_lsf),
    AllocationReader("sge", "PE_HOSTFILE", "PE_HOSTFILE", _read_sge),
    AllocationReader("flux", "FLUX_URI", "", read_flux),
    AllocationReader("htcondor", "_CONDOR_PROCNO", "", read_htcondor),
)


def list_schedulers() -> tuple[AllocationReader, ...]:
    """List hvdkit's own readers, and then those of the installed packages, in the order of their names.

    A package cannot replace a reader of hvdkit's.
    Raises HvdkitError for a package that cannot be loaded, or whose entry point is not a reader of the same name.
    """
    packages = load_entry_points(ENTRY_POINTS, {each.name for each in SCHEDULERS}, _find_flaw)
    return (*SCHEDULERS, *packages.values())


def _find_flaw(name: str, reader: object) -> str:
    right = isinstance(reader, AllocationReader) and reader.name == name
    return "" if right else f"is not an AllocationReader with the name {name}"
