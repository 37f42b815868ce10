"""LSF's allocation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from hvdkit.errors import LaunchError
from hvdkit.launch.allocation.file import read_listed
from hvdkit.launch.hosts.host import FoundHosts, Host
from hvdkit.launch.hosts.lsf import LSF, parse_pairs, parse_repeats
from hvdkit.launch.hosts.reading import count_repeats

_MORE = "ask LSF for more with bsub -n and -R 'span[ptile=N]', or say how many here with --slots-per-host"
_LAUNCH_HOST = re.compile(r"batch|login|launch")


def read(environ: Mapping[str, str], slots: int | None = None) -> FoundHosts | None:
    """Read the hosts of an LSF job; None outside of LSF."""
    job = environ.get("LSB_JOBID")
    if job is None:
        return None
    source = f"LSF job {job}"
    found = _read_variables(environ, source)
    if found is None and "LSB_DJOB_HOSTFILE" in environ:
        found = read_listed(LSF, environ["LSB_DJOB_HOSTFILE"], source, None, more=_MORE)
    if found is None:
        raise LaunchError(
            f"{source}: none of LSB_MCPU_HOSTS, LSB_HOSTS and LSB_DJOB_HOSTFILE is set. Say where to run with -H."
        )
    hosts, notes = _drop_launch_host(found.hosts, environ, source)
    if slots:
        hosts = tuple(replace(host, slots=slots) for host in hosts)
    return replace(found, hosts=hosts, notes=notes)


def _read_variables(environ: Mapping[str, str], source: str) -> FoundHosts | None:
    for name, parse in (("LSB_MCPU_HOSTS", parse_pairs), ("LSB_HOSTS", parse_repeats)):
        if name in environ:
            try:
                hosts = count_repeats(parse(environ[name]))
            except ValueError as problem:
                raise LaunchError(f"{source}: {name}: {problem}. Say where to run with -H or --hostfile.") from None
            hosts = tuple(replace(host, slots=host.slots or 1) for host in hosts)
            return FoundHosts(hosts, source, more=_MORE, allocated=True)
    return None


def _drop_launch_host(
    hosts: tuple[Host, ...], environ: Mapping[str, str], source: str
) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """On systems like Summit the list begins with the host of the batch script, with one slot, which has no GPU."""
    first, rest = hosts[0], hosts[1:]
    alone = first.slots == 1 and rest and all((host.slots or 1) > 1 for host in rest)
    if alone and ("CSM_ALLOCATION_ID" in environ or _LAUNCH_HOST.search(first.name)):
        note = f"{source}: {first.name} is left out, as the host of the batch script. To use it too, list all with -H."
        return rest, (note,)
    return hosts, ()
