"""The command line that starts a job, for each starter. Nothing is started here."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from hvdkit.errors import LaunchError
from hvdkit.launch.choose import Choice
from hvdkit.launch.job import Job, Launch
from hvdkit.launch.mpi import Mpi
from hvdkit.launch.starters.intel_mpi import build_intel_mpi
from hvdkit.launch.starters.jsrun import build_jsrun
from hvdkit.launch.starters.mpich import build_mpich
from hvdkit.launch.starters.open_mpi import build_open_mpi
from hvdkit.launch.starters.pals import build_pals
from hvdkit.launch.starters.srun import build_srun

__all__ = ["build_choice", "build_launch"]


class _Builder(Protocol):
    def __call__(self, job: Job, mpi: Mpi, *, ssh: bool = False) -> Launch: ...


_BUILDERS: dict[str, _Builder] = {
    "open_mpi": build_open_mpi,
    "mpich": build_mpich,
    "intel_mpi": build_intel_mpi,
}


def build_launch(job: Job, mpi: Mpi, *, ssh: bool = False) -> Launch:
    """Build the command line for an MPI's own mpirun. ssh: also where the scheduler could start its daemons."""
    if mpi.kind == "pals":
        return build_pals(job, mpi.mpirun)
    return _BUILDERS[mpi.kind](job, mpi, ssh=ssh)


def build_choice(job: Job, choice: Choice) -> Launch:
    """Build the command line for the starter that was chosen."""
    if choice.starter == "srun":
        return build_srun(job, choice.program, choice.pmi, choice.mpi)
    if choice.starter == "jsrun":
        return build_jsrun(job, choice.program)
    if choice.mpi is None:
        raise LaunchError(f"{choice.starter} was chosen without an MPI. This is an error in hvdkit: please report it.")
    mpi = replace(choice.mpi, mpirun=choice.program) if choice.program else choice.mpi
    return build_launch(job, mpi, ssh=choice.starter == "ssh")
