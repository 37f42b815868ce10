"""Facts about the MPI library of mpi4py, the launchers on PATH, and two ranks started with them."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace

from hvdkit.errors import LaunchError
from hvdkit.launch.detect.launchers import parse_pmi_list
from hvdkit.launch.detect.mpi import find_mpi, parse_version
from hvdkit.launch.plan.environment import clean_environment
from hvdkit.launch.plan.mpi import WITHOUT_FABRICS
from hvdkit.launch.process import run_program
from hvdkit.tools.doctor.collect.probes import probe_argv, run_probe
from hvdkit.tools.doctor.facts import HvdrunMpi, Launcher, MpiLibrary, Trial
from hvdkit.tools.installed import find_version

# A single rank of Open MPI 5 leaves its file in /dev/shm behind, unless these variables prevent that.
_ALONE = {**WITHOUT_FABRICS, "OMPI_MCA_btl": "self"}
_LOAD_TIMEOUT_S = 15.0
_VERSION_TIMEOUT_S = 5.0
# Found in the text of MPI_Get_library_version. Libraries built on MPICH contain its name too, so they come before it.
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
    """Find the kind of a library from its version text; "" for an unknown library."""
    return next((kind for kind, pattern in _LIBRARIES if pattern.search(library)), "")


def read_launchers(environ: Mapping[str, str]) -> tuple[Launcher, ...]:
    """Find the launchers on PATH, and read the versions of those of MPI or Slurm."""
    path = environ.get("PATH", os.defpath)
    found = [(name, shutil.which(name, path=path)) for name in _LAUNCHERS]
    return tuple(_read_launcher(name, os.path.abspath(where), environ) for name, where in found if where)


def read_hvdrun_mpi(environ: Mapping[str, str]) -> HvdrunMpi:
    """Find the mpirun that hvdrun uses."""
    try:
        mpi = find_mpi(environ, sys.prefix)
    except LaunchError as error:
        return HvdrunMpi(error=str(error))
    return HvdrunMpi(mpi.mpirun, mpi.kind, mpi.name, mpi.version, mpi.site, mpi.library)


def _read_launcher(name: str, path: str, environ: Mapping[str, str]) -> Launcher:
    if name in ("horovodrun", "torchrun"):  # they import a framework to print their version, which is the package's
        return Launcher(name, path, name, find_version(name.removesuffix("run")))
    result = run_program([path, "--version"], environ=environ, timeout_s=_VERSION_TIMEOUT_S)
    if result.status is None:
        return Launcher(name, path, error=f"--version did not answer within {_VERSION_TIMEOUT_S:g} s")
    known = parse_version(result.output)
    if known is not None:
        return Launcher(name, path, known[0], known[2])
    slurm = _SLURM.match(result.stdout)
    if slurm:
        return Launcher(name, path, "slurm", slurm.group(1))
    line = next((line.strip() for line in result.output.splitlines() if line.strip()), "nothing")
    return Launcher(name, path, error=f"{result.ending}; --version printed: {line}" if result.status else "")


_TIMEOUT_S = 20.0
# Ranks in worlds of their own would each leave Open MPI's file in shared memory behind; ranks of one world connect over
# TCP too.
_TIDY = {**WITHOUT_FABRICS, "OMPI_MCA_btl": "self,tcp"}
#: Variables to remove: this trial does not use an allocation's hosts.
_SCHEDULERS = re.compile(r"(SLURM|SLURMD|SRUN|PBS|LSB|LS|SGE|PE|FLUX)_.*")


def try_two_ranks(environ: Mapping[str, str]) -> Trial:
    """Start two ranks on this host with the first mpirun on PATH; without mpirun, return an empty Trial."""
    path = environ.get("PATH", os.defpath)
    found = shutil.which("mpirun", path=path) or shutil.which("mpiexec", path=path)
    if not found:
        return Trial()
    mpirun = os.path.abspath(found)
    known = parse_version(run_program([mpirun, "--version"], environ=environ, timeout_s=_VERSION_TIMEOUT_S).output)
    if known is None:
        return Trial()
    variables = {k: v for k, v in clean_environment(environ).items() if not _SCHEDULERS.fullmatch(k)}
    return _try(mpirun, _options(known[0]), {**_TIDY, **variables})


def try_srun(environ: Mapping[str, str]) -> Trial:
    """Start two ranks with srun under its settings here, in an allocation of Slurm and outside of its steps."""
    srun = shutil.which("srun", path=environ.get("PATH", os.defpath))
    if not srun or "SLURM_JOB_ID" not in environ or "SLURM_STEP_ID" in environ:
        return Trial()
    types = run_program([srun, "--mpi=list"], environ=environ, timeout_s=_TIMEOUT_S)
    found = _try(srun, ["--overlap", "--nodes=1", "--cpu-bind=none"], {**_TIDY, **environ})
    return replace(found, kinds=parse_pmi_list(types.output))


def _try(program: str, options: list[str], environ: Mapping[str, str]) -> Trial:
    argv = [program, *options, "-n", "2", *probe_argv("count_ranks")]
    result = run_program(argv, environ=environ, timeout_s=_TIMEOUT_S)
    sizes = tuple(json.loads(line)["size"] for line in result.stdout.splitlines() if line.startswith('{"size"'))
    if len(sizes) >= 2:
        return Trial(program, sizes)
    return Trial(program, sizes, f"{result.ending}: {_first_line(result.stderr + result.stdout)}")


def _options(kind: str) -> list[str]:
    if kind != "open_mpi":
        return []
    # More ranks than cores are no fault here, and this trial does not check the binding of ranks.
    options = ["--bind-to", "none", "--oversubscribe"]
    return ["--allow-run-as-root", *options] if os.geteuid() == 0 else options


def _first_line(text: str) -> str:
    """Return the first line with text: Open MPI draws frames around its messages."""
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line.strip("-=*")), "it said nothing")
