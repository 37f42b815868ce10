"""Detect the scheduler, the MPI and the launchers of this machine."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvdkit.errors import LaunchError
from hvdkit.launch.allocations.schedulers import find_scheduler
from hvdkit.launch.plan.mpi import Mpi, find_mpi, query

_SRUN_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class LauncherEnvironment:
    """What the choice of a launcher depends on.

    scheduler: in whose job this runs: slurm, pbs, lsf, sge; "" for none.
    local: all ranks run on this machine. named_hosts: the user has named the hosts.
    mpi: the MPI of the mpirun that was found; None without any, and then no_mpi is the error message.
    programs: paths of mpiexec, srun and jsrun, where they exist.
    pmi: the plugins that `srun --mpi=list` prints. pmi_wish: the user's plugin for srun (SLURM_MPI_TYPE).
    pmi_library: the user's library for Intel MPI under srun (I_MPI_PMI_LIBRARY).
    cray: the environment is Cray MPICH's.
    """

    scheduler: str = ""
    local: bool = False
    named_hosts: bool = False
    mpi: Mpi | None = None
    no_mpi: str = ""
    programs: Mapping[str, str] = field(default_factory=dict)
    pmi: tuple[str, ...] = ()
    pmi_wish: str = ""
    pmi_library: str = ""
    cray: bool = False


def detect_launchers(
    environ: Mapping[str, str], prefix: str, *, local: bool, named_hosts: bool, wish: str = ""
) -> LauncherEnvironment:
    """Detect what can start ranks.

    environ: hvdrun's variables. prefix: sys.prefix. local, named_hosts: see LauncherEnvironment.
    wish: the user's --launcher; srun is asked for its plugins only if it may be needed.
    """
    path = environ.get("PATH", os.defpath)
    programs = {name: program for name in ("srun", "jsrun") if (program := shutil.which(name, path=path))}
    mpi, no_mpi = None, ""
    try:
        mpi = find_mpi(environ, prefix)
    except LaunchError as error:
        no_mpi = str(error)
    if mpi is not None:
        sibling = Path(mpi.mpirun).with_name("mpiexec")
        programs["mpiexec"] = str(sibling) if os.access(sibling, os.X_OK) else mpi.mpirun
    scheduler = find_scheduler(environ)
    needs_pmi = "srun" in programs and scheduler == "slurm" and (wish == "srun" or mpi is None)
    return LauncherEnvironment(
        scheduler=scheduler,
        local=local,
        named_hosts=named_hosts,
        mpi=mpi,
        no_mpi=no_mpi,
        programs=programs,
        pmi=_list_pmi(programs["srun"], environ) if needs_pmi else (),
        pmi_wish=environ.get("SLURM_MPI_TYPE", ""),
        pmi_library=environ.get("I_MPI_PMI_LIBRARY", ""),
        cray="CRAY_MPICH_DIR" in environ or "CRAY_MPICH_VERSION" in environ,
    )


def parse_pmi_list(text: str) -> tuple[str, ...]:
    """Parse the output of `srun --mpi=list`, whose form depends on Slurm's version."""
    return tuple(dict.fromkeys(re.findall(r"\b(none|pmi2|pmi1|pmix(?:_v\d+)?|cray_shasta|openmpi)\b", text)))


def _list_pmi(srun: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    cure = "Check Slurm on this host, or use --launcher ssh."
    return parse_pmi_list(query([srun, "--mpi=list"], environ, _SRUN_TIMEOUT_S, cure))
