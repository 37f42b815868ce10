"""The hosts to run on: from -H, a hostfile, or the scheduler's allocation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hvdkit.errors import LaunchError
from hvdkit.launch.allocations import read_allocation
from hvdkit.launch.allocations.schedulers import SCHEDULERS
from hvdkit.launch.hostfiles import AUTO, FoundHosts, find_hostfile, parse_host_list


def find_hosts(
    hosts: str | None,
    hostfile: str | None,
    environ: Mapping[str, str],
    *,
    format: str = AUTO,
    slots: int | None = None,
) -> FoundHosts | None:
    """Find the hosts to run on; None without any source of hosts, which means this machine.

    hosts, hostfile: -H and --hostfile. environ: hvdrun's variables.
    format: the dialect of the file. slots: for hosts without a number, and for all hosts of an allocation.
    Raises LaunchError; HostfileError for a file.
    """
    if hosts is not None and hostfile is not None:
        raise LaunchError("-H and --hostfile cannot be used together. Remove one of them.")
    if slots is not None and slots < 1:
        raise LaunchError(f"--slots-per-host {slots} is not a number of slots; it must be 1 or more.")
    if format != AUTO and hostfile is None:
        raise LaunchError(f"--hostfile-format {format} is given without --hostfile. Add --hostfile FILE, or remove it.")
    if hostfile is not None:
        return find_hostfile(hostfile, _find_format(hostfile, environ) if format == AUTO else format, slots)
    if hosts is not None:
        return FoundHosts(parse_host_list(hosts, slots or 1), "-H")
    return read_allocation(environ, slots)


def _find_format(path: str, environ: Mapping[str, str]) -> str:
    for scheduler in SCHEDULERS:
        nodefile = environ.get(scheduler.nodefile, "")
        if nodefile and Path(path) == Path(nodefile):
            return scheduler.name
    return AUTO
