"""The schedulers by the name that --scheduler takes, and the one of this site."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping

from hvdkit.errors import SubmitError
from hvdkit.tools.submit.kubernetes import KUBERNETES
from hvdkit.tools.submit.lsf import LSF
from hvdkit.tools.submit.pbs import PBS
from hvdkit.tools.submit.scheduler import Scheduler
from hvdkit.tools.submit.slurm import SLURM
from hvdkit.tools.submit.trainjob import TRAINJOB

SCHEDULERS: Mapping[str, Scheduler] = {"slurm": SLURM, "pbs": PBS, "lsf": LSF, "k8s": KUBERNETES}

#: What a job is on Kubernetes, by the name that --kind takes.
KINDS: Mapping[str, Scheduler] = {"mpijob": KUBERNETES, "trainjob": TRAINJOB}


def find_scheduler(environ: Mapping[str, str]) -> str:
    """Find the scheduler of this site. Raises SubmitError if there is none, or more than one."""
    path = environ.get("PATH", "")
    found = find_defaults(lambda name: shutil.which(name, path=path) is not None, environ)
    if len(found) == 1:
        return found[0]
    if found:
        raise SubmitError(f"PATH has the commands of several schedulers. Choose: --scheduler {' or '.join(found)}.")
    raise SubmitError(
        "None of sbatch, qsub (PBS) and bsub is on PATH. Run this on a host where jobs are submitted; or choose with "
        f"--scheduler ({', '.join(SCHEDULERS)}) and print the script with --dry-run. In a job script of Grid Engine, "
        "Torque, Flux or HTCondor hvdrun needs no hosts: see docs/clusters/schedulers.md."
    )


def find_defaults(on_path: Callable[[str], bool], environ: Mapping[str, str]) -> list[str]:
    """Name the schedulers whose command is on PATH. Kubernetes is used only if it is named."""
    qsub = on_path("qsub") and "SGE_ROOT" not in environ  # Grid Engine has a qsub too, with other options
    return [name for name, found in (("slurm", on_path("sbatch")), ("pbs", qsub), ("lsf", on_path("bsub"))) if found]
