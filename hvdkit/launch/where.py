"""Where to run: -H, a hostfile, or the allocation that this is in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hvdkit.errors import LaunchError
from hvdkit.launch.allocation import read_allocation
from hvdkit.launch.hosts import AUTO, FoundHosts, find_hostfile, parse_host_list

# Files that schedulers write: whoever passes one on has said which dialect it is in.
_WRITTEN_BY = {"PBS_NODEFILE": "pbs", "PE_HOSTFILE": "sge", "LSB_DJOB_HOSTFILE": "lsf"}


def find_hosts(
    hosts: str | None,
    hostfile: str | None,
    environ: Mapping[str, str],
    *,
    format: str = AUTO,
    slots: int | None = None,
) -> FoundHosts | None:
    """Find out where to run; None if nobody says: then it is this machine.

    hosts, hostfile: -H and --hostfile. environ: the variables hvdrun was given.
    format: the dialect of the file. slots: for hosts without a number, and for all those of an allocation.
    Raises LaunchError, which is a HostfileError for a file.
    """
    if hosts is not None and hostfile is not None:
        raise LaunchError("-H and --hostfile both say where to run. Leave one of them out.")
    if slots is not None and slots < 1:
        raise LaunchError(f"--slots-per-host {slots} leaves no room for a rank; it must be 1 or more.")
    if format != AUTO and hostfile is None:
        raise LaunchError(f"--hostfile-format {format} says how to read a hostfile, and there is no --hostfile.")
    if hostfile is not None:
        return find_hostfile(hostfile, _know_format(hostfile, environ) if format == AUTO else format, slots)
    if hosts is not None:
        return FoundHosts(parse_host_list(hosts, slots or 1), "-H")
    return read_allocation(environ, slots)


def _know_format(path: str, environ: Mapping[str, str]) -> str:
    for name, format in _WRITTEN_BY.items():
        if environ.get(name) and Path(path) == Path(environ[name]):
            return format
    return AUTO
