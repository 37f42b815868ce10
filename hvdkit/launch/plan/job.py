"""A job, its limits and its command line, as data."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdkit.config import Config, read_config
from hvdkit.errors import LaunchError
from hvdkit.launch.hostfiles import Host
from hvdkit.launch.plan.elasticity import Elasticity
from hvdkit.launch.plan.gpu_sharing import GpuSharing

AGENT = str(Path(__file__).parents[1] / "agent")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command, the number of its ranks, their hosts and variables.

    hosts: in rank order; () means this machine, with slots for all ranks.
    local: every host is this machine.
    environ: hvdrun's variables, without those of another launcher (`clean_environment`).
    variables: set by hvdrun for the ranks, with precedence over environ.
    forwarded: names of variables to send to all hosts, also if they belong to this host.
    python: runs the rank agent; the same path on every host.
    notes: messages to print before the start.
    ssh_options, launcher_arguments: the user's own, for ssh and for the launcher.
    binding: the launcher's own options for binding ranks to cores; with None it does not bind.
    bind: how hvdkit then binds, see the setting.
    gpu_sharing: what becomes of a job whose ranks would share GPUs.
    networks: interfaces or subnets for traffic between hosts; () to choose.
    tcp: use only TCP between hosts.
    elasticity: the reaction to the loss of ranks.
    directory: this job's own, on this host, for the launcher's files; "" before the job runs.
    addresses: of this host, as other hosts reach it; () if all ranks are on this host.
    logs: the folder of the ranks' logs, for messages.
    verbose: report every start, show the launcher's output at once.
    start_timeout_s: time for all ranks to start, in seconds.
    save_timeout_s: time for ranks that handle SIGTERM to save and end, in seconds.
    metrics_port: for Prometheus, on this host's loopback address; 0 for any port, None for no port.
    rank_variables: give the ranks the variables of torchrun, Keras, JAX and Horovod.
    """

    command: tuple[str, ...]
    ranks: int
    hosts: tuple[Host, ...] = ()
    local: bool = True
    environ: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    forwarded: tuple[str, ...] = ()
    root: bool = False
    python: str = "python3"
    agent: str = AGENT
    notes: tuple[str, ...] = ()
    ssh_options: tuple[str, ...] = ()
    launcher_arguments: tuple[str, ...] = ()
    binding: tuple[str, ...] | None = None
    bind: str = "auto"
    gpu_sharing: GpuSharing = GpuSharing.WARNED
    networks: tuple[str, ...] = ()
    tcp: bool = False
    elasticity: Elasticity = Elasticity.OFF
    directory: str = ""
    addresses: tuple[str, ...] = ()
    logs: str = ""
    verbose: bool = False
    start_timeout_s: float = 60.0
    save_timeout_s: float = 25.0
    metrics_port: int | None = None
    rank_variables: bool = True

    @property
    def survives(self) -> bool:
        """Do ranks continue when others die?"""
        return self.elasticity is Elasticity.SURVIVE

    @property
    def agent_command(self) -> list[str]:
        """The command with each rank's agent before it. -I -S: starts in 20 ms, and no user file can interfere."""
        return [self.python, "-I", "-S", self.agent, "--", *self.command]

    @property
    def planned(self) -> tuple[tuple[str, int], ...]:
        """(host, ranks) in the order of ranks; () if the launcher may place them differently."""
        users = self.binding is not None or self.launcher_arguments  # which may determine the hosts of the ranks
        one_host_of_many_names = self.local and len(self.hosts) > 1
        if users or one_host_of_many_names or not all(host.slots for host in self.hosts):
            return ()
        return plan_places(self.ranks, self.hosts)

    @functools.cached_property
    def config(self) -> Config:
        """The settings of the ranks. Raises ConfigError for an invalid setting."""
        return read_config({**self.environ, **self.variables})


@dataclass(frozen=True)
class Launch:
    """A command line that starts a job.

    variables: set in its environment. removed: names removed from it.
    """

    argv: tuple[str, ...]
    variables: Mapping[str, str]
    removed: tuple[str, ...] = ()


def plan_ranks(ranks: int | None, hosts: tuple[Host, ...], cores: Mapping[str, int], more_slots_hint: str = "") -> int:
    """Plan the number of ranks: as requested, or one for each slot.

    ranks: as requested, or None.
    hosts: to run on; () for this machine.
    cores: number of cores of hosts, by name, as far as known; for hosts without slots.
    more_slots_hint: how to get more slots, for the message.
    Raises LaunchError if the ranks are more than the slots, or their number is unknown.
    """
    total = total_slots(hosts, cores) if hosts else None
    if ranks is None:
        if total is None:
            raise LaunchError(
                "The number of ranks is missing. Set it with -np, like: hvdrun -np 2 train.py", code="np-missing"
            )
        return total
    if ranks < 1:
        raise LaunchError(f"-np {ranks} is not a number of ranks; it must be 1 or more.", code="np-invalid")
    if total is not None and ranks > total:
        places = ", ".join(f"{host.name}:{host.slots or cores[host.name]}" for host in hosts)
        raise LaunchError(
            f"-np {ranks} is more than the {total} slot{'s' * (total != 1)} of {places}. "
            f"Request {total} rank{'s' * (total != 1)}, "
            f"or {more_slots_hint or 'give the hosts more slots, as in node1:4'}.",
            code="not-enough-slots",
        )
    return ranks


def total_slots(hosts: tuple[Host, ...], cores: Mapping[str, int]) -> int | None:
    """Count the slots of hosts; None if the slots of a host are unknown. cores: see plan_ranks."""
    slots = [cores.get(host.name) if host.slots is None else host.slots for host in hosts]
    return None if None in slots else sum(each or 0 for each in slots)


def plan_places(ranks: int, hosts: tuple[Host, ...]) -> tuple[tuple[str, int], ...]:
    """Fill the hosts in their order; returns (host, ranks on it), without hosts that have none.

    A host without a number of slots takes all remaining ranks.
    """
    places = []
    for host in hosts:
        count = min(ranks, host.slots or ranks)
        if count:
            places.append((host.name, count))
        ranks -= count
    return tuple(places)


def name_host(rank: int, reported: Mapping[int, str], planned: Sequence[tuple[str, int]]) -> str:
    """Return the name of a rank's host in the plan, else its reported name; "" if neither is known."""
    names = [name for name, count in planned for _ in range(count)]
    return names[rank] if rank < len(names) else reported.get(rank, "")


def format_shell_line(launch: Launch) -> str:
    """Write a launch as one line for a shell."""
    words = [word for name in launch.removed for word in ("-u", name)]
    words += [f"{name}={value}" for name, value in sorted(launch.variables.items())]
    return shlex.join(["env", *words, *launch.argv] if words else launch.argv)
