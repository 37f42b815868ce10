"""Which hosts: those that are named, or those of the allocation that this process is in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from hvdkit.errors import LaunchError
from hvdkit.launch.hosts import Host, parse_host_list, read_hostfile
from hvdkit.tools.doctor.checks.scheduler import parse_counts
from hvdkit.tools.doctor.probe import run_program

_TIMEOUT_S = 10.0


def find_hosts(hosts: str | None, hostfile: str | None, environ: Mapping[str, str]) -> tuple[tuple[Host, ...], str]:
    """Find the hosts, and where they come from: "" for none, options, Slurm, PBS or LSF.

    Raises LaunchError for a list that cannot be used.
    """
    if hosts is not None and hostfile is not None:
        raise LaunchError("-H and --hostfile both name hosts. Leave one of them out.")
    if hostfile is not None:
        return read_hostfile(hostfile), "options"
    if hosts is not None:
        return parse_host_list(hosts), "options"
    if environ.get("SLURM_JOB_ID") and environ.get("SLURM_JOB_NODELIST"):
        return _read_slurm(environ), "Slurm"
    if environ.get("PBS_NODEFILE"):
        return _count(_read_lines(environ["PBS_NODEFILE"])), "PBS"
    if environ.get("LSB_DJOB_HOSTFILE"):
        return _count(_read_lines(environ["LSB_DJOB_HOSTFILE"])), "LSF"
    return (), ""


def _read_slurm(environ: Mapping[str, str]) -> tuple[Host, ...]:
    argv = ["scontrol", "show", "hostnames", environ["SLURM_JOB_NODELIST"]]
    status, out, err = run_program(argv, environ=environ, timeout_s=_TIMEOUT_S)
    names = out.split()
    if status or not names:
        raise LaunchError(
            f"scontrol does not tell the hosts of {environ['SLURM_JOB_NODELIST']}: "
            f"{(err or out).strip() or 'no answer'}. "
            "Name them with -H."
        )
    counts = parse_counts(environ.get("SLURM_TASKS_PER_NODE", ""))
    slots = counts if len(counts) == len(names) else [1] * len(names)
    return tuple(Host(name, count) for name, count in zip(names, slots, strict=True))


def _count(names: list[str]) -> tuple[Host, ...]:
    return tuple(Host(name, count) for name, count in Counter(names).items())


def _read_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().split()
    except OSError as error:
        raise LaunchError(f"The scheduler's list of hosts {path} cannot be read: {error.strerror}.") from None
