"""Two ranks, started as somebody would who has never heard of hvdrun."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace

from hvdkit.launch.environment import clean_environment
from hvdkit.launch.facts import parse_pmi_list
from hvdkit.tools.doctor.look.mpi import QUICK, read_version
from hvdkit.tools.doctor.machine import Trial
from hvdkit.tools.doctor.probe import describe_status, find_probe, run_program

_TIMEOUT_S = 20.0
# Two ranks that are alone would each leave Open MPI's file in shared memory behind; others meet by TCP too.
_TIDY = {**QUICK, "OMPI_MCA_btl": "self,tcp"}
#: An allocation's hosts are not what is tried here.
_SCHEDULERS = re.compile(r"(SLURM|SLURMD|SRUN|PBS|LSB|LS|SGE|PE)_.*")


def try_two_ranks(environ: Mapping[str, str]) -> Trial:
    """Start two ranks on this host with the mpirun that is first on PATH; nothing is tried without one."""
    path = environ.get("PATH", os.defpath)
    found = shutil.which("mpirun", path=path) or shutil.which("mpiexec", path=path)
    if not found:
        return Trial()
    mpirun = os.path.abspath(found)
    kind, version = read_version(mpirun, environ)
    if not kind:
        return Trial()
    variables = {k: v for k, v in clean_environment(environ).items() if not _SCHEDULERS.fullmatch(k)}
    return _try(mpirun, _options(kind, version), {**_TIDY, **variables})


def try_srun(environ: Mapping[str, str]) -> Trial:
    """Start two ranks with srun as it is set here, in an allocation of Slurm and outside of its steps."""
    srun = shutil.which("srun", path=environ.get("PATH", os.defpath))
    if not srun or "SLURM_JOB_ID" not in environ or "SLURM_STEP_ID" in environ:
        return Trial()
    _, out, err = run_program([srun, "--mpi=list"], environ=environ, timeout_s=_TIMEOUT_S)
    found = _try(srun, ["--overlap", "--nodes=1", "--cpu-bind=none"], {**_TIDY, **environ})
    return replace(found, kinds=parse_pmi_list(out + err))


def _try(program: str, options: list[str], environ: Mapping[str, str]) -> Trial:
    argv = [program, *options, "-n", "2", sys.executable, find_probe("count_ranks")]
    status, out, err = run_program(argv, environ=environ, timeout_s=_TIMEOUT_S)
    sizes = tuple(json.loads(line)["size"] for line in out.splitlines() if line.startswith('{"size"'))
    if len(sizes) >= 2:
        return Trial(program, sizes)
    if status is None:
        return Trial(program, sizes, f"two ranks did not end within {_TIMEOUT_S:.0f} s")
    return Trial(program, sizes, f"{describe_status(status or 0)}: {_first_line(err + out)}")


def _options(kind: str, version: str) -> list[str]:
    if kind != "open_mpi":
        return []
    # More ranks than cores are no fault here, and binding two ranks is not what is asked about.
    options = ["--bind-to", "none", "--oversubscribe"]
    return ["--allow-run-as-root", *options] if os.geteuid() == 0 else options


def _first_line(text: str) -> str:
    """The first line that says something: Open MPI draws frames around its messages."""
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line.strip("-=*")), "it said nothing")
