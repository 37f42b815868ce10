"""The facts that a plan depends on besides the options: this machine, the hosts and their programs, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdkit.errors import LaunchError
from hvdkit.launch.hostfiles import FoundHosts, Host
from hvdkit.launch.plan.network import InterfaceAddress
from hvdkit.launch.plan.selected_launcher import LauncherEnvironment
from hvdkit.setting import Settings


@dataclass(frozen=True)
class KnownHost:
    """Facts about a host.

    local: it is this machine. known: the name service or ssh resolves it. address: its first address; "" for none.
    """

    local: bool
    known: bool = True
    address: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of a job; `prepare` collects them.

    environ: hvdrun's variables.
    found: the hosts to run on.
    hosts: the facts of each host, by its login.
    cores: number of cores of this machine.
    requested_ranks: the number of ranks of -np; None for one on each slot.
    command: of the ranks.
    command_problem: the error if the command cannot be started; else None.
    home: see `choose_home`.
    ssh_options: the user's own.
    interfaces: of this machine; () if all hosts are local.
    seed: for --wrap.
    directory: the working directory.
    root: hvdrun runs as root.
    python: see Job.
    launchers: the programs that can start ranks; None if only a Job is planned.
    packages: the settings of the installed packages.
    """

    environ: Mapping[str, str]
    found: FoundHosts
    hosts: Mapping[str, KnownHost] = field(default_factory=dict)
    cores: int = 1
    requested_ranks: int | None = None
    command: tuple[str, ...] = ()
    command_problem: LaunchError | None = None
    home: Mapping[str, str] = field(default_factory=dict)
    ssh_options: tuple[str, ...] = ()
    interfaces: tuple[InterfaceAddress, ...] = ()
    seed: str = ""
    directory: str = "/"
    root: bool = False
    python: str = "python3"
    launchers: LauncherEnvironment | None = None
    packages: tuple[type[Settings], ...] = ()

    def of(self, host: Host) -> KnownHost:
        """Return the facts of a host."""
        return self.hosts[host.login]

    @property
    def local(self) -> bool:
        """Are all hosts this machine?"""
        return all(self.of(host).local for host in self.found.hosts)
