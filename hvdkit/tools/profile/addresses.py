"""The addresses that `hvdkit profile` listens at: those by which the ranks of the job reach this host."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdkit.errors import HvdkitError
from hvdkit.launch.agent.host_info import read_interfaces
from hvdkit.launch.cli.options import parse_arguments
from hvdkit.launch.plan.network import parse_interfaces
from hvdkit.launch.plan.resolve_hosts import find_addresses, find_hosts, is_local
from hvdkit.tools.training_command import find_launcher
from hvdkit.transport.addresses import LOOPBACK


def choose_addresses(command: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Choose the addresses for a job of hvdrun: those towards its hosts, or the loopback's if all ranks are local.

    The hosts of another launcher are unknown: then all addresses that may lead to other hosts, and the loopback's.
    """
    if find_launcher(command) == "hvdrun":
        arguments = command[1:] if Path(command[0]).name == "hvdrun" else command[3:]
        # hvdrun itself reports the options that it refuses.
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
                remote = [host for host in found.hosts if not is_local(host)] if found is not None else []
                return find_addresses(remote) if remote else (LOOPBACK,)
    interfaces = [each for each in parse_interfaces(read_interfaces()) if each.between_hosts]
    return (LOOPBACK, *dict.fromkeys(each.address for each in interfaces))
