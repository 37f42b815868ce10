"""The MPI library under mpi4py, and the programs that start ranks."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping

from hvdkit.errors import LaunchError
from hvdkit.launch.environment import clean_environment
from hvdkit.launch.mpi import find_mpi, parse_version
from hvdkit.tools.build_horovod.versions import find_version
from hvdkit.tools.doctor.facts import HvdrunMpi, Launcher, MpiLibrary
from hvdkit.tools.doctor.probe import describe_status, run_probe, run_program

#: As hvdrun's ranks on one host have it: looking for the network's libraries takes a second.
QUICK = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^ofi,uct", "OMPI_MCA_osc": "^ucx"}
# A single rank of Open MPI 5 leaves its file in /dev/shm behind, unless it makes none.
_ALONE = {**QUICK, "OMPI_MCA_btl": "self"}
_LOAD_TIMEOUT_S = 15.0
_VERSION_TIMEOUT_S = 5.0
# By what MPI_Get_library_version says. Those built on MPICH name it too, so they stand before it.
_LIBRARIES = (
    ("open_mpi", re.compile(r"Open MPI|Spectrum MPI")),
    ("cray_mpich", re.compile(r"CRAY MPICH", re.IGNORECASE)),
    ("intel_mpi", re.compile(r"Intel\(R\) MPI")),
    ("mvapich", re.compile(r"MVAPICH", re.IGNORECASE)),
    ("mpich", re.compile(r"MPICH")),
)
_LAUNCHERS = ("mpirun", "mpiexec", "srun", "jsrun", "horovodrun", "torchrun")
_SLURM = re.compile(r"slurm(?:-wlm)?\s+(\d\S*)")


def read_library(environ: Mapping[str, str]) -> MpiLibrary:
    """Load and start MPI in another process, as a single rank."""
    mpi4py = find_version("mpi4py")
    if not mpi4py:
        return MpiLibrary()
    answer = run_probe("load_mpi", {**_ALONE, **clean_environment(environ)}, _LOAD_TIMEOUT_S)
    words = {name: str(answer.get(name, "")) for name in ("library", "path", "standard", "threads", "error")}
    return MpiLibrary(mpi4py=mpi4py, kind=library_kind(words["library"]), **words)


def library_kind(library: str) -> str:
    """Tell the kind from what a library says of itself; "" for one that is not known."""
    return next((kind for kind, pattern in _LIBRARIES if pattern.search(library)), "")


def read_launchers(environ: Mapping[str, str]) -> tuple[Launcher, ...]:
    """Find the launchers on PATH, and ask those that know MPI or Slurm for their version."""
    path = environ.get("PATH", os.defpath)
    found = [(name, shutil.which(name, path=path)) for name in _LAUNCHERS]
    return tuple(_read_launcher(name, os.path.abspath(where), environ) for name, where in found if where)


def read_hvdrun_mpi(environ: Mapping[str, str]) -> HvdrunMpi:
    """Tell which mpirun hvdrun would take."""
    try:
        mpi = find_mpi(environ, sys.prefix)
    except LaunchError as error:
        return HvdrunMpi(error=str(error))
    return HvdrunMpi(mpi.mpirun, mpi.kind, mpi.name, mpi.version, mpi.site, mpi.library)


def read_version(mpirun: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Ask an mpirun for its kind and version; "" if it is none that is known here."""
    _, out, err = run_program([mpirun, "--version"], environ=environ, timeout_s=_VERSION_TIMEOUT_S)
    known = parse_version(out + err)
    return (known[0], known[2]) if known is not None else ("", "")


def _read_launcher(name: str, path: str, environ: Mapping[str, str]) -> Launcher:
    if name in ("horovodrun", "torchrun"):  # they import a framework to tell their version, which is the package's
        return Launcher(name, path, name, find_version(name.removesuffix("run")))
    status, out, err = run_program([path, "--version"], environ=environ, timeout_s=_VERSION_TIMEOUT_S)
    if status is None:
        return Launcher(name, path, error=f"it did not answer to --version within {_VERSION_TIMEOUT_S:.0f} s")
    known = parse_version(out + err)
    if known is not None:
        return Launcher(name, path, known[0], known[2])
    slurm = _SLURM.match(out)
    if slurm:
        return Launcher(name, path, "slurm", slurm.group(1))
    said = next((line.strip() for line in (out + err).splitlines() if line.strip()), "nothing")
    return Launcher(name, path, error=f"{describe_status(status)}; to --version it says: {said}" if status else "")
