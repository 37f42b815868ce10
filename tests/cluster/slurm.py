"""A real Slurm on the hosts of the lab: slurmctld on the first, slurmd and munged on each; no accounting or cgroups."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from cluster.lab import Lab, environment, wait_until
from cluster.needs import pmix_folder

_CONF = """\
ClusterName=lab
SlurmctldHost={head}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
# The hosts share the machine's cores: nothing is bound, and each claims to have more cores than there are.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
# so that a test sees in seconds what takes minutes elsewhere
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=5
UnkillableStepTimeout=10
MinJobAge=300
BatchStartTimeout=10
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=0,bf_interval=1,batch_sched_delay=0
NodeName={nodes} CPUs=4 RealMemory=2000 Gres=gpu:2 State=UNKNOWN
PartitionName=normal Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=0
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""

# Where it finds no cgroups slurmd 22 ends at once, unless it is told to use version 1, which then does nothing.
_CGROUP_CONF = "CgroupPlugin=cgroup/v1\n"

_HOST_UP = """\
set -e
folder=$1 name=$2 head=$3 pmix=$4
mountpoint -q /etc/slurm || mount --bind "$folder/etc" /etc/slurm
[ -z "$pmix" ] || mountpoint -q "$pmix" || mount --bind "$folder/pmix" "$pmix"
if ! munge -n >/dev/null 2>&1; then
    rm -f "$folder/slurmd.$name.pid"
    [ $name != $head ] || rm -f "$folder/slurmctld.pid"
    munged --force --key-file="$folder/munge.key" --socket=/run/munge/munge.socket.2 --pid-file=/run/munge/munged.pid \\
        --log-file="$folder/log/munged.$name.log" --seed-file=/run/munge/seed
fi
[ $name != $head ] || [ -e "$folder/slurmctld.pid" ] || slurmctld -c
[ -e "$folder/slurmd.$name.pid" ] || slurmd
for _ in $(seq 100); do # it goes to the background before it listens
    (exec 3<>/dev/tcp/$name/6818) 2>/dev/null && break
    sleep 0.1
done
"""

# Each host has two GPUs, as Slurm sees it: devices that are there. It shares them out, and shows each task its own.
_GRES_CONF = "Name=gpu Flags=nvidia_gpu_env File={folder}/gpu[0-1]\n"


class Slurm:
    """Slurm on all hosts of a lab; its programs are on every host's PATH and need no variables."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.head = lab.names[0]
        self.folder = lab.folder / "slurm"

    def up(self) -> None:
        """Start Slurm, or what of it is missing on a host that was halted; all hosts are idle when it returns."""
        if not self.folder.exists():
            self._write()
        pmix = pmix_folder() if (self.folder / "pmix").exists() else None
        for name in self.lab.names:
            script: list[str | Path] = ["bash", "-c", _HOST_UP, "bash", self.folder, name, self.head, str(pmix or "")]
            done = self.lab.run(name, script)
            assert done.returncode == 0, done.stdout + done.stderr + self._logs()
        if not wait_until(self._all_idle, 90):
            raise RuntimeError(f"Slurm's hosts did not become idle:\n{self._logs()}")
        self.lab.settle()

    def run(
        self, *command: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's programs on the first host."""
        return self.lab.run(self.head, command, env=env or environment(), cwd=cwd, timeout=timeout)

    def batch(
        self, folder: Path, body: str, *options: str, env: Mapping[str, str] | None = None, timeout: float = 150
    ) -> tuple[int, str]:
        """Submit a batch script and wait for it; returns its exit code and all that it printed.

        body: below #!/bin/bash. options: sbatch's, like -N2.
        """
        script, output = folder / "job.sh", folder / "job.out"
        script.write_text(f"#!/bin/bash\n{body}\n")
        words = ["sbatch", "--parsable", f"--output={output}", f"--chdir={folder}", *options, str(script)]
        submitted = self.run(*words, env=env)
        assert submitted.returncode == 0, submitted.stderr
        self.wait_for(lambda: "ExitCode" in self._ended(submitted.stdout.strip()), timeout)
        code = self._ended(submitted.stdout.strip())["ExitCode"].partition(":")[0]
        return int(code), output.read_text() if output.exists() else ""

    def _ended(self, job: str) -> dict[str, str]:
        """What Slurm says of a job; {} until it has ended. (`sbatch --wait` asks only every few seconds.)"""
        words = self.run("scontrol", "--oneliner", "show", "job", job).stdout.split()
        fields = dict(word.split("=", 1) for word in words if "=" in word)
        return fields if fields.get("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL") else {}

    def wait_for(self, true: Callable[[], object], seconds: float = 60) -> None:
        """Wait until something is so; fails with Slurm's logs if it does not come to be."""
        if not wait_until(true, seconds):
            raise AssertionError(f"it did not happen within {seconds} s:\n{self.run('squeue').stdout}\n{self._logs()}")

    def cancel_all(self) -> None:
        """End all jobs and wait until the hosts are idle again."""
        if self.run("squeue", "--noheader").stdout.strip():
            self.run("scancel", "--state=RUNNING", "--state=PENDING", "--state=SUSPENDED")
        self.ready()

    def ready(self) -> None:
        """Bring back the hosts on which Slurm is not running, or which it holds for down."""
        if not (self._all_run() and self._all_idle()):
            self.up()

    def _all_run(self) -> bool:
        """Has each host its daemon? Slurm takes one that was halted for idle until it has been silent for long."""
        hosts = self.lab.hosts.values()
        return all(any(line.startswith("slurmd") for line in host.processes().values()) for host in hosts)

    def _all_idle(self) -> bool:
        states = self.run("sinfo", "--noheader", "--Node", "--partition=normal", "--format=%T").stdout.split()
        return states == ["idle"] * len(self.lab.names)

    def _write(self) -> None:
        for name in ("etc", "state", "log", *(f"spool.{host}" for host in self.lab.names)):
            (self.folder / name).mkdir(parents=True)
        nodes = f"{self.lab.names[0][:-1]}[1-{len(self.lab.names)}]"
        conf = _CONF.format(head=self.head, folder=self.folder, nodes=nodes)
        (self.folder / "etc" / "slurm.conf").write_text(conf)
        (self.folder / "etc" / "cgroup.conf").write_text(_CGROUP_CONF)
        (self.folder / "etc" / "gres.conf").write_text(_GRES_CONF.format(folder=self.folder))
        for number in range(2):
            os.mknod(self.folder / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))  # as /dev/null
        key = os.open(self.folder / "munge.key", os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(key, os.urandom(128))
        os.close(key)
        pmix = pmix_folder()
        if pmix is not None and not (pmix / "libpmix.so").exists():
            # Slurm loads it by this name, which only the package for developers has.
            shutil.copytree(pmix, self.folder / "pmix", symlinks=True)
            (self.folder / "pmix" / "libpmix.so").symlink_to("libpmix.so.2")

    def _logs(self) -> str:
        logs = sorted((self.folder / "log").glob("*.log"))
        return "\n".join(f"{path.name}:\n{re.sub('^', '  ', path.read_text(errors='replace'))}" for path in logs)
