"""Checks of cores, memory, limits and the clock."""

from __future__ import annotations

from collections.abc import Iterator

from hvdkit.launch.plan.resources import LEAST_SHARED_MIB
from hvdkit.tools.doctor.facts import UNLIMITED, HostFacts, SharedMemory
from hvdkit.tools.doctor.findings import Finding, JobRequest

_MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "hugetlbfs", "")
_LEAST_FILES = 1024
_LEAST_PROCESSES = 1024
_LEAST_LOCKED_BYTES = 2**30
_CLOCK_SLACK_S = 120.0
_NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "afs", "9p")


def check_machine(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Check the machine."""
    yield from _check_cores(facts, job)
    yield from _check_shared(facts.machine.shared)
    yield from _check_limits(facts)
    clock = facts.machine.clock
    if clock.now < clock.newest - _CLOCK_SLACK_S:
        yield Finding.warning(
            "clock-behind",
            f"The clock is {clock.newest - clock.now:.0f} s behind the time of hvdkit's installation.",
            "Set the clock (chronyd or ntpd): munge, Kerberos and make fail with wrong times.",
        )
    if job.hosts > 1 and facts.machine.prefix_filesystem in _NETWORK_FILESYSTEMS:
        yield Finding.warning(
            "python-on-nfs",
            f"Python's environment {facts.prefix} is on {facts.machine.prefix_filesystem}: every rank reads "
            "thousands of small files from there when it imports a framework, which takes minutes with many ranks.",
            "Copy the environment to each host's own disk at the start of the job, or put it into a container image.",
        )


def _check_cores(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    cpu = facts.machine.cpu
    allowed = len(cpu.allowed)
    if allowed == 1 < cpu.cores:
        under_slurm = "SLURM_JOB_ID" in facts.environ
        yield Finding.warning(
            "one-core",
            f"This process is bound to core {cpu.allowed[0]} of {cpu.cores}: all that it starts, torchrun's ranks "
            "and data loaders too, shares this core.",
            "Give the task its cores: srun --cpus-per-task=N, or srun --cpu-bind=none."
            if under_slurm
            else "Start it without taskset or binding: mpirun --bind-to none, or hvdrun, which gives each rank its own "
            "cores.",
        )
    elif job.ranks_here > allowed > 0:
        yield Finding.warning(
            "few-cores",
            f"{job.ranks_here} ranks would share the {allowed} cores that may be used here.",
            "Ask for fewer ranks on this host (slots), or for more cores (--cpus-per-task, ncpus).",
        )
    if 0 < cpu.quota < allowed:
        yield Finding.warning(
            "cpu-quota",
            f"{allowed} cores are visible, but the cgroup's CPU quota is {cpu.quota:g} cores: one thread for each "
            "core is more than can run.",
            f"Set OMP_NUM_THREADS so that ranks times threads is {max(1, int(cpu.quota))}, or raise the container's "
            "limit.",
        )


def _check_shared(shared: SharedMemory) -> Iterator[Finding]:
    if shared.total_bytes < 0:
        yield Finding.error(
            "shm-missing",
            f"There is no {shared.folder}: ranks on one host cannot share memory.",
            "Mount a tmpfs there, or set HVDKIT_SHARED_DIRECTORY to a folder in memory.",
        )
        return
    if shared.filesystem not in _MEMORY_FILESYSTEMS:
        yield Finding.warning(
            "shm-on-disk",
            f"{shared.folder} is on {shared.filesystem}, not in memory: every reduction would be written to disk.",
            "Set HVDKIT_SHARED_DIRECTORY to a tmpfs, like /dev/shm.",
        )
    elif shared.free_bytes < LEAST_SHARED_MIB << 20:
        yield Finding.warning(
            "shm-small",
            f"{shared.folder} has {shared.free_bytes / 2**20:.0f} MiB free of {shared.total_bytes / 2**20:.0f}: too "
            "little for the gradients of all but small models.",
            "In Docker: --shm-size=8g; in Kubernetes: an emptyDir of medium Memory there; as root: "
            f"mount -o remount,size=8g {shared.folder}.",
        )
    if shared.leftovers:
        total = sum(left.bytes for left in shared.leftovers)
        shown = " ".join(left.path for left in shared.leftovers[:3])
        more = f" and {len(shared.leftovers) - 3} more" if len(shared.leftovers) > 3 else ""
        yield Finding(
            "warning" if total > 0.1 * shared.total_bytes else "note",
            "shm-leftovers",
            f"{len(shared.leftovers)} files of ended jobs occupy {total / 2**20:.1f} MiB in {shared.folder}: "
            f"{shown}{more}.",
            "Remove them when no job of yours runs on this host.",
        )


def _check_limits(facts: HostFacts) -> Iterator[Finding]:
    limits, fabrics = facts.machine.limits, facts.machine.fabrics
    if limits.nofile != UNLIMITED and limits.nofile < _LEAST_FILES:
        yield Finding.warning(
            "limit-files",
            f"A process may have {limits.nofile} files open (ulimit -n): connections between ranks and data loaders "
            "need more.",
            "Run: ulimit -n 65536, or raise the limit in /etc/security/limits.conf.",
        )
    if limits.nproc != UNLIMITED and limits.nproc < _LEAST_PROCESSES:
        yield Finding.warning(
            "limit-processes",
            f"This user may have {limits.nproc} processes and threads (ulimit -u): a rank has dozens.",
            "Run: ulimit -u 16384, or raise the limit in /etc/security/limits.conf.",
        )
    devices = fabrics.infiniband or fabrics.slingshot
    if devices and limits.memlock != UNLIMITED and limits.memlock < _LEAST_LOCKED_BYTES:
        yield Finding.warning(
            "limit-memlock",
            f"A process may lock {limits.memlock / 2**10:.0f} KiB of memory (ulimit -l), but {', '.join(devices)} need "
            "locked memory for all data that is sent: MPI and NCCL fail, or fall back to TCP.",
            "Set memlock to unlimited in /etc/security/limits.conf, and for the scheduler's daemon: "
            "LimitMEMLOCK=infinity.",
        )
