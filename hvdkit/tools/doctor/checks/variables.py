"""Variables that say who a rank is, and where the ranks meet."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping

from hvdkit.errors import WorldError
from hvdkit.tools.doctor.facts import Facts
from hvdkit.tools.doctor.finding import Finding
from hvdkit.tools.doctor.job import Job
from hvdkit.world import read_world


def check_variables(facts: Facts, job: Job) -> Iterator[Finding]:
    """Judge them."""
    environ = facts.environ
    try:
        launcher = read_world(environ).launcher
    except WorldError as error:
        yield Finding("error", "launcher-variables", str(error), "Start again from a fresh shell.")
        return
    if launcher != "torchrun":
        yield from _check_rank(environ, launcher)
        yield from _check_port(facts)
    hosts = max(job.hosts, *map(_number, (environ.get("SLURM_JOB_NUM_NODES", ""), environ.get("SLURM_NNODES", ""))))
    address = environ.get("MASTER_ADDR", "")
    if hosts > 1 and _is_loopback(address):
        yield Finding(
            "error",
            "master-address",
            f"MASTER_ADDR={address} is every host itself, and there are {hosts}: they would not find one another.",
            'Set it to the first host\'s name: export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | '
            "head -n1).",
        )


def _check_rank(environ: Mapping[str, str], launcher: str) -> Iterator[Finding]:
    rank = environ.get("RANK", "")
    if not rank:
        return
    slurm = environ.get("SLURM_PROCID", "") if launcher == "slurm" else ""
    if "SLURM_JOB_ID" in environ and (launcher == "none" or (slurm and slurm != rank)):
        yield Finding(
            "error",
            "rank-exported",
            f"RANK={rank} is set in the batch script, so it is the same for every task.",
            "Set it in the step, where each task has its own: srun bash -c 'RANK=$SLURM_PROCID python train.py'. "
            "hvdkit needs no RANK: leave it out.",
        )
    elif launcher == "none":
        yield Finding(
            "warning",
            "rank-exported",
            f"RANK={rank} is set, and no launcher has started this process: torch.distributed would believe it.",
            "Run: unset RANK WORLD_SIZE LOCAL_RANK",
        )


def _check_port(facts: Facts) -> Iterator[Finding]:
    environ, port = facts.environ, facts.machine.port
    own = environ.get("MASTER_ADDR", "") in ("", facts.host, *facts.machine.network.addresses) or _is_loopback(
        environ.get("MASTER_ADDR", "")
    )
    if not port.free and own:
        yield Finding(
            "error",
            "master-port",
            f"MASTER_PORT={port.number} is taken on {facts.host} already, by another job perhaps.",
            "Derive it from the job: export MASTER_PORT=$((10000 + ${SLURM_JOB_ID:-$$} % 20000)).",
        )
    elif port.number and "SLURM_ARRAY_TASK_ID" in environ:
        job = environ.get("SLURM_JOB_ID", "")
        if str(port.number)[-3:] != job[-3:] and port.number != 10000 + _number(job) % 20000:
            yield Finding(
                "warning",
                "master-port",
                f"MASTER_PORT={port.number} looks the same for all tasks of this job array: two on one host would "
                "collide.",
                "Derive it from the job: export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)).",
            )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
