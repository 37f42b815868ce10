"""Detect the programs of this machine that can start ranks."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from hvdkit.errors import LaunchError
from hvdkit.launch.allocations.schedulers import find_scheduler
from hvdkit.launch.detect.mpi import find_mpi, query
from hvdkit.launch.plan.selected_launcher import LauncherEnvironment

_SRUN_TIMEOUT_S = 20.0


def detect_launchers(
    environ: Mapping[str, str], prefix: str, *, local: bool, named_hosts: bool, wish: str = "", own_ssh: bool = False
) -> LauncherEnvironment:
    """Detect the programs that can start ranks.

    environ: hvdrun's variables.
    prefix: sys.prefix.
    local, named_hosts, own_ssh: see LauncherEnvironment.
    wish: the user's --launcher; srun lists its plugins only if it may be needed.
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
    if scheduler == "sge" and mpi is not None and mpi.kind == "open_mpi" and (qrsh := _find_qrsh(environ)):
        programs["qrsh"] = qrsh
    pmi = ""
    if "srun" in programs and scheduler == "slurm" and (wish == "srun" or mpi is None):
        cure = "Check Slurm on this host, or use --launcher ssh."
        pmi = query([programs["srun"], "--mpi=list"], environ, _SRUN_TIMEOUT_S, cure)
    return LauncherEnvironment(
        scheduler=scheduler,
        local=local,
        named_hosts=named_hosts,
        mpi=mpi,
        no_mpi=no_mpi,
        programs=programs,
        own_ssh=own_ssh,
        pmi=parse_pmi_list(pmi),
        pmi_wish=environ.get("SLURM_MPI_TYPE", ""),
        pmi_library=environ.get("I_MPI_PMI_LIBRARY", ""),
        cray="CRAY_MPICH_DIR" in environ or "CRAY_MPICH_VERSION" in environ,
    )


def parse_pmi_list(text: str) -> tuple[str, ...]:
    """Parse the output of `srun --mpi=list`, whose form depends on Slurm's version."""
    return tuple(dict.fromkeys(re.findall(r"\b(none|pmi2|pmi1|pmix(?:_v\d+)?|cray_shasta|openmpi)\b", text)))


def _find_qrsh(environ: Mapping[str, str]) -> str:
    """Find Grid Engine's qrsh at the path that Open MPI expects; "" if it is not there."""
    if not all(environ.get(name) for name in ("SGE_ROOT", "ARC", "JOB_ID")):
        return ""
    path = os.pathsep.join((environ.get("PATH", os.defpath), f"{environ['SGE_ROOT']}/bin/{environ['ARC']}"))
    return shutil.which("qrsh", path=path) or ""
