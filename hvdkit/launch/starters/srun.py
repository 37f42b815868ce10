"""srun, inside a job of Slurm."""

from __future__ import annotations

from hvdkit.launch.job import Job, Launch
from hvdkit.launch.mpi import Mpi
from hvdkit.launch.starters.common import (
    fill_hosts,
    library_variables,
    refuse_ipv6,
    refuse_ssh_options,
    refuse_users,
    unless_set,
)

# What the job says of the layout of its steps; this one says all of it itself.
_LAYOUT = ("SLURM_DISTRIBUTION", "SLURM_HOSTFILE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


def build_srun(job: Job, srun: str, pmi: str, mpi: Mpi | None) -> Launch:
    """Build the command line for srun.

    pmi: the plugin by which ranks find each other. With one that the library does not speak each rank would be alone.
    mpi: whose library the ranks load; None if it is not known.
    """
    for refuse in (refuse_ipv6, refuse_users, refuse_ssh_options):
        refuse(job, "srun")
    variables = {**job.variables, **(library_variables(job, mpi) if mpi else {})}
    argv = [srun, f"--mpi={pmi}", f"--ntasks={job.ranks}"]
    argv += _write_places(job)
    # A task that fails ends the step; otherwise srun waits for the others. All variables reach the ranks, whatever
    # sbatch was told; and --cpus-per-task, which a step does not inherit from the job.
    argv += ["--kill-on-bad-exit=1", "--export=ALL"]
    if job.environ.get("SLURM_CPUS_PER_TASK"):
        argv.append(f"--cpus-per-task={job.environ['SLURM_CPUS_PER_TASK']}")
    argv += ["--cpu-bind=none"] if job.binding is None else job.binding
    if pmi.startswith("pmix"):
        # Otherwise each rank says that it cannot use munge.
        variables.update(unless_set({"PMIX_MCA_psec": "native"}, job.environ))
    if job.tcp:
        tcp = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^ofi,uct,openib,usnic", "FI_PROVIDER": "tcp"}
        variables.update(unless_set(tcp, job.environ))
    return Launch((*argv, *job.starter_arguments, *job.agent_command), variables, _LAYOUT)


def _write_places(job: Job) -> list[str]:
    if job.local:
        here = job.environ.get("SLURMD_NODENAME", "")
        return ["--nodes=1", *([f"--nodelist={here}"] if here else [])]
    places = list(fill_hosts(job))
    names = ",".join(name for name, _ in places)
    if len({count for _, count in places}) == 1:
        return [f"--nodes={len(places)}", f"--ntasks-per-node={places[0][1]}", f"--nodelist={names}"]
    # With an arbitrary distribution the list has a host for each rank.
    each = ",".join(name for name, count in places for _ in range(count))
    return [f"--nodes={len(places)}", "--distribution=arbitrary", f"--nodelist={each}"]
