"""Find the hosts to run on, from -H, a hostfile or the scheduler's allocation, and their addresses."""

from __future__ import annotations

import functools
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from hvdkit.errors import LaunchError
from hvdkit.launch.agent.host_info import allowed_cpus
from hvdkit.launch.allocations import read_allocation
from hvdkit.launch.allocations.schedulers import list_schedulers
from hvdkit.launch.hostfiles import AUTO, DIALECTS, FoundHosts, Host, find_hostfile, parse_host_list
from hvdkit.launch.process import run_program


def find_hosts(
    hosts: str | None, hostfile: str | None, environ: Mapping[str, str], *, format: str = AUTO, slots: int | None = None
) -> FoundHosts | None:
    """Find the hosts to run on; None without any source of hosts, which means this machine.

    hosts, hostfile: -H and --hostfile.
    environ: hvdrun's variables.
    format: the dialect of the file.
    slots: for hosts without a number, and for all hosts of an allocation.

    Raises LaunchError; HostfileError for a file.
    """
    if hosts is not None and hostfile is not None:
        raise LaunchError("-H and --hostfile cannot be used together. Remove one of them.", code="hosts-given-twice")
    if slots is not None and slots < 1:
        raise LaunchError(
            f"--slots-per-host {slots} is not a number of slots; it must be 1 or more.", code="slots-invalid"
        )
    if format != AUTO and hostfile is None:
        raise LaunchError(
            f"--hostfile-format {format} is given without --hostfile. Add --hostfile FILE, or remove it.",
            code="hostfile-format-without-file",
        )
    if hostfile is not None:
        files = {each.name: environ.get(each.nodefile) for each in list_schedulers() if each.name in DIALECTS}
        own = (name for name, file in files.items() if file and Path(file) == Path(hostfile))
        return find_hostfile(hostfile, next(own, AUTO) if format == AUTO else format, slots)
    if hosts is not None:
        return FoundHosts(parse_host_list(hosts, slots or 1), "-H")
    return read_allocation(environ, slots)


_SSH_TIMEOUT_S = 5.0


def count_cores() -> int:
    """Count the cores that this process may use."""
    return len(allowed_cpus())


@functools.cache
def resolve(name: str) -> tuple[str, ...]:
    """Resolve the name of a host to its addresses; () if it has none."""
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in answers))


def is_local(host: Host) -> bool:
    """Is a host this machine?"""
    if host.user:
        return False  # reached over ssh, even on this machine
    if host.name in ("localhost", socket.gethostname()):
        return True
    return any(is_own_address(address) for address in resolve(host.name))


def is_own_address(address: str) -> bool:
    """Is an address this machine's? Only such an address can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def is_known(host: Host) -> bool:
    """Does the name service or ssh's configuration resolve a host?"""
    return is_local(host) or bool(resolve(host.name)) or _ssh_knows(host)


def find_addresses(hosts: Iterable[Host]) -> tuple[str, ...]:
    """Find this machine's addresses as the other hosts reach it.

    For hosts that only ssh can reach (through a jump host) these are the addresses of this machine's name.
    Raises LaunchError if none is found.
    """
    addresses: dict[str, None] = {}
    for host in hosts:
        if is_local(host):
            continue
        for target in resolve(host.name) or resolve(_ssh_settings(host.login).get("hostname", host.name)):
            own = _address_towards(target)
            if own:
                addresses[own] = None
    if not addresses:
        addresses.update(dict.fromkeys(resolve(socket.gethostname())))
    own_addresses = tuple(address for address in addresses if not address.startswith("127.") and address != "::1")
    if not own_addresses:
        raise LaunchError(
            f"This machine ({socket.gethostname()}) has no address that the other hosts can connect to. "
            "Add one to /etc/hosts or DNS.",
            code="no-own-address",
        )
    return own_addresses


def _address_towards(target: str) -> str:
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))  # sends nothing: it only selects the route
        except OSError:
            return ""
        return str(probe.getsockname()[0])


@functools.cache
def _ssh_settings(login: str) -> Mapping[str, str]:
    result = run_program(["ssh", "-G", "--", login], timeout_s=_SSH_TIMEOUT_S)
    return dict(line.partition(" ")[::2] for line in result.stdout.splitlines())


def _ssh_knows(host: Host) -> bool:
    settings = _ssh_settings(host.login)
    if {"proxyjump", "proxycommand"} & settings.keys():
        return True  # the jump host resolves the name
    name = settings.get("hostname", host.name)
    return name != host.name and bool(resolve(name))
