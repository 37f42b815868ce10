"""The command line of a job, for each launcher."""

from __future__ import annotations

from collections.abc import Callable

from hvdkit.launch.launchers.hydra import build_intel_mpi, build_mpich
from hvdkit.launch.launchers.open_mpi import build_open_mpi
from hvdkit.launch.launchers.site import build_jsrun, build_pals
from hvdkit.launch.launchers.srun import build_srun
from hvdkit.launch.plan.job import Job, Launch
from hvdkit.launch.plan.launcher_choice import LauncherChoice

# By launcher, or by the kind of the MPI whose mpirun is the launcher.
_BUILDERS: dict[str, Callable[[Job, LauncherChoice], Launch]] = {
    "srun": build_srun,
    "jsrun": build_jsrun,
    "open_mpi": build_open_mpi,
    "mpich": build_mpich,
    "intel_mpi": build_intel_mpi,
    "pals": build_pals,
}


def build_launch(job: Job, choice: LauncherChoice) -> Launch:
    """Build the command line for a launcher. Raises LaunchError for a job that it cannot express."""
    return _BUILDERS[choice.launcher if choice.launcher in _BUILDERS else choice.own_mpi.kind](job, choice)
