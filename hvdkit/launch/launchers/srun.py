"""srun, inside a job of Slurm."""

from __future__ import annotations

from hvdkit.launch.launchers.common import (
    LIBFABRIC_TCP,
    OPEN_MPI_TCP,
    fill_hosts,
    library_variables,
    refuse_ipv6,
    refuse_ssh_options,
    refuse_users,
    unless_set,
)
from hvdkit.launch.plan.job import Job, Launch
from hvdkit.launch.plan.launcher_choice import LauncherChoice

# The job's defaults for the layout of its steps; the command line gives the whole layout itself.
_LAYOUT = ("SLURM_DISTRIBUTION", "SLURM_HOSTFILE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


def build_srun(job: Job, choice: LauncherChoice) -> Launch:
    """Build the command line for srun. The ranks load the library of the choice's MPI, if it has one."""
    for refuse in (refuse_ipv6, refuse_users, refuse_ssh_options):
        refuse(job, "srun")
    variables = {**job.variables, **(library_variables(job, choice.mpi) if choice.mpi else {})}
    argv = [choice.program, f"--mpi={choice.pmi}", f"--ntasks={job.ranks}", *_layout_options(job)]
    # A task that fails ends the step; otherwise srun waits for the others. All variables reach the ranks, whatever
    # options sbatch had; and --cpus-per-task, which a step does not inherit from the job.
    argv += ["--kill-on-bad-exit=1", "--export=ALL"]
    if job.environ.get("SLURM_CPUS_PER_TASK"):
        argv.append(f"--cpus-per-task={job.environ['SLURM_CPUS_PER_TASK']}")
    argv += ["--cpu-bind=none"] if job.binding is None else job.binding
    if choice.pmi.startswith("pmix"):
        # Otherwise each rank prints that it cannot use munge.
        variables.update(unless_set({"PMIX_MCA_psec": "native"}, job.environ))
    if job.tcp:
        variables.update(unless_set({**OPEN_MPI_TCP, **LIBFABRIC_TCP}, job.environ))
    return Launch((*argv, *job.launcher_arguments, *job.agent_command), variables, _LAYOUT)


def _layout_options(job: Job) -> list[str]:
    if job.local:
        node = job.environ.get("SLURMD_NODENAME", "")
        return ["--nodes=1", *([f"--nodelist={node}"] if node else [])]
    places = fill_hosts(job)
    names = ",".join(name for name, _ in places)
    if len({count for _, count in places}) == 1:
        return [f"--nodes={len(places)}", f"--ntasks-per-node={places[0][1]}", f"--nodelist={names}"]
    # With an arbitrary distribution the list has a host for each rank.
    each = ",".join(name for name, count in places for _ in range(count))
    return [f"--nodes={len(places)}", "--distribution=arbitrary", f"--nodelist={each}"]
