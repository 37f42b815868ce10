"""Where `hvdkit profile` listens: at the addresses by which the ranks of the job reach this machine."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdkit.errors import HvdkitError
from hvdkit.launch.agent.interfaces import read_interfaces
from hvdkit.launch.check import find_addresses, is_local
from hvdkit.launch.cli import parse_arguments
from hvdkit.launch.network import parse_interfaces
from hvdkit.launch.where import find_hosts
from hvdkit.transport.addresses import LOOPBACK


def choose_addresses(command: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Choose the addresses for a job: of hvdrun those towards its hosts, the loopback's if all ranks are here.

    Of another launcher the hosts are not known: then all addresses that may lead to other hosts, and the loopback's.
    """
    arguments = find_hvdrun(command)
    if arguments is not None:
        # What hvdrun does not understand it says itself.
        with contextlib.suppress(HvdkitError, SystemExit), contextlib.redirect_stderr(io.StringIO()):
            options = parse_arguments(arguments)
            if options.host_discovery_script is None:
                found = find_hosts(
                    options.hosts,
                    options.hostfile,
                    environ,
                    format=options.hostfile_format,
                    slots=options.slots_per_host,
                )
                away = [host for host in found.hosts if not is_local(host)] if found is not None else []
                return find_addresses(away) if away else (LOOPBACK,)
    interfaces = [each for each in parse_interfaces(read_interfaces()) if each.between_hosts]
    return (LOOPBACK, *dict.fromkeys(each.address for each in interfaces))


def find_hvdrun(command: Sequence[str]) -> Sequence[str] | None:
    """Find the arguments of hvdrun in a command that runs it; None for another command."""
    if Path(command[0]).name == "hvdrun":
        return command[1:]
    if Path(command[0]).name.startswith("python") and list(command[1:3]) == ["-m", "hvdkit.launch"]:
        return command[3:]
    return None
