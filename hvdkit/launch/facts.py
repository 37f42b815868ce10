"""Find out what there is to start ranks with."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hvdkit.errors import LaunchError
from hvdkit.launch.choose import Facts
from hvdkit.launch.mpi import find_mpi

_LIST_S = 20.0
# Whose job this is in, by what each scheduler sets in its jobs and nowhere else.
_SCHEDULERS = (("slurm", "SLURM_JOB_ID"), ("pbs", "PBS_JOBID"), ("lsf", "LSB_JOBID"), ("sge", "PE_HOSTFILE"))


def gather_facts(environ: Mapping[str, str], prefix: str, *, local: bool, by_hand: bool, wish: str = "") -> Facts:
    """Look around.

    environ: the variables hvdrun was given. prefix: sys.prefix.
    local, by_hand: see Facts. wish: what the user insists on; srun is asked only if it may be needed.
    """
    path = environ.get("PATH", os.defpath)
    programs = {name: found for name in ("srun", "jsrun") if (found := shutil.which(name, path=path))}
    mpi, no_mpi = None, ""
    try:
        mpi = find_mpi(environ, prefix)
    except LaunchError as error:
        no_mpi = str(error)
    if mpi is not None:
        beside = Path(mpi.mpirun).with_name("mpiexec")
        programs["mpiexec"] = str(beside) if os.access(beside, os.X_OK) else mpi.mpirun
    scheduler = find_scheduler(environ)
    asks_srun = "srun" in programs and scheduler == "slurm" and (wish == "srun" or mpi is None)
    return Facts(
        scheduler=scheduler,
        local=local,
        by_hand=by_hand,
        mpi=mpi,
        no_mpi=no_mpi,
        programs=programs,
        pmi=_ask_srun(programs["srun"], environ) if asks_srun else (),
        pmi_wish=environ.get("SLURM_MPI_TYPE", ""),
        pmi_library=environ.get("I_MPI_PMI_LIBRARY", ""),
        cray="CRAY_MPICH_DIR" in environ or "CRAY_MPICH_VERSION" in environ,
    )


def find_scheduler(environ: Mapping[str, str]) -> str:
    """Tell whose job this is in; "" for none."""
    return next((name for name, variable in _SCHEDULERS if environ.get(variable)), "")


def parse_pmi_list(text: str) -> tuple[str, ...]:
    """Read what `srun --mpi=list` prints; its form differs from version to version."""
    return tuple(dict.fromkeys(re.findall(r"\b(none|pmi2|pmi1|pmix(?:_v\d+)?|cray_shasta|openmpi)\b", text)))


def _ask_srun(srun: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    try:
        answer = subprocess.run(
            [srun, "--mpi=list"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIST_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{srun} --mpi=list does not answer: {error}. Is Slurm well on this host?") from None
    return parse_pmi_list((answer.stdout + answer.stderr).decode(errors="replace"))
