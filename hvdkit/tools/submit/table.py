"""The schedulers, by the name that --scheduler takes."""

from __future__ import annotations

from collections.abc import Mapping

from hvdkit.tools.submit import kubernetes, lsf, pbs, slurm
from hvdkit.tools.submit.scheduler import (
    Scheduler,
    first_match,
    read_lsf_state,
    read_mpijob_state,
    read_pbs_state,
    read_slurm_state,
)

SCHEDULERS: Mapping[str, Scheduler] = {
    "slurm": Scheduler(
        title="Slurm",
        write=slurm.write_script,
        submit=("sbatch", "--parsable"),
        read_id=first_match(r"(?m)^(\d+)(?:;\S*)?\s*$"),
        ask=lambda job: ("scontrol", "--oneliner", "show", "job", job),
        read_state=read_slurm_state,
        cancel=lambda job: ("scancel", job),
    ),
    "pbs": Scheduler(
        title="PBS",
        write=pbs.write_script,
        submit=("qsub",),
        read_id=first_match(r"(?m)^(\d+(?:\.[A-Za-z0-9.-]+)?)\s*$"),
        ask=lambda job: ("qstat", "-x", "-f", job),
        read_state=read_pbs_state,
        cancel=lambda job: ("qdel", job),
    ),
    "lsf": Scheduler(
        title="LSF",
        write=lsf.write_script,
        submit=("bsub",),
        read_id=first_match(r"Job <(\d+)> is submitted"),
        ask=lambda job: ("bjobs", "-noheader", "-o", "stat exit_code", job),
        read_state=read_lsf_state,
        cancel=lambda job: ("bkill", job),
    ),
    "k8s": Scheduler(
        title="Kubernetes",
        write=kubernetes.write_manifest,
        submit=("kubectl", "create", "-f", "-", "-o", "name"),
        read_id=first_match(r"mpijob\.kubeflow\.org/([a-z0-9-]+)"),
        ask=lambda job: ("kubectl", "get", "mpijob", job, "-o", "json"),
        read_state=read_mpijob_state,
        cancel=lambda job: ("kubectl", "delete", "mpijob", job),
        read_log=lambda job: ("kubectl", "logs", "--follow", f"job/{job}-launcher"),
    ),
}
