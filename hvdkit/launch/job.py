"""What is to be started, as data."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvdkit.errors import LaunchError
from hvdkit.launch.hosts import Host

AGENT = str(Path(__file__).with_name("agent"))


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command, how many ranks of it, where, and with which variables.

    hosts: in rank order; () means this machine, with room for all ranks.
    local: every host is this machine.
    environ: the variables hvdrun was given, already without another launcher's (`clean_environment`).
    variables: what hvdrun sets for the ranks on top of them.
    python: runs the rank agent; must be at the same path on every host.
    notes: what the user should be told before it starts.
    ssh_options: the user's own, for ssh. starter_arguments: the user's own, for whatever starts the ranks.
    binding: how to bind ranks to cores, in the starter's words; with None it leaves them unbound. bind: how hvdkit then
    does it, see the setting.
    tcp: between hosts use nothing but TCP.
    elastic: ranks that die are outlived by the others.
    """

    command: tuple[str, ...]
    ranks: int
    hosts: tuple[Host, ...] = ()
    local: bool = True
    environ: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    root: bool = False
    python: str = "python3"
    agent: str = AGENT
    notes: tuple[str, ...] = ()
    ssh_options: tuple[str, ...] = ()
    starter_arguments: tuple[str, ...] = ()
    binding: tuple[str, ...] | None = None
    bind: str = "auto"
    tcp: bool = False
    elastic: bool = False

    @property
    def agent_command(self) -> list[str]:
        """The command as each rank's agent gets it. -I -S: starts in 20 ms and no user file can interfere."""
        return [self.python, "-I", "-S", self.agent, "--", *self.command]


@dataclass(frozen=True)
class Launch:
    """A command line that starts a job.

    variables: to be set in its environment.
    removed: names to be taken out of it.
    """

    argv: tuple[str, ...]
    variables: Mapping[str, str]
    removed: tuple[str, ...] = ()


def plan_ranks(ranks: int | None, hosts: tuple[Host, ...], cores: Mapping[str, int], more: str = "") -> int:
    """Settle the number of ranks: as asked, or one for each slot.

    cores: of the hosts whose cores are known, by name; for hosts without slots.
    more: how to get more slots than there are, for the message.
    Raises LaunchError if there are more ranks than slots, or no way to tell how many ranks.
    """
    known = [cores.get(host.name) if host.slots is None else host.slots for host in hosts]
    room = count_room(hosts, cores) if hosts else None
    if ranks is None:
        if room is None:
            raise LaunchError("How many ranks? Say it with -np, like: hvdrun -np 2 python train.py")
        return room
    if ranks < 1:
        raise LaunchError(f"-np {ranks} starts nothing; it must be 1 or more.")
    if room is not None and ranks > room:
        places = ", ".join(f"{host.name}:{slots}" for host, slots in zip(hosts, known, strict=True))
        raise LaunchError(
            f"-np {ranks} is more than the {room} slots of {places}. "
            f"Ask for {room} ranks, or {more or 'give the hosts more slots'}."
        )
    return ranks


def count_room(hosts: tuple[Host, ...], cores: Mapping[str, int]) -> int | None:
    """Count the slots of hosts; None if those of one are not known. cores: see plan_ranks."""
    known = [cores.get(host.name) if host.slots is None else host.slots for host in hosts]
    return None if None in known else sum(slots or 0 for slots in known)


def plan_places(ranks: int, hosts: tuple[Host, ...]) -> tuple[tuple[str, int], ...]:
    """Fill the hosts in their order; returns (host, ranks on it), without hosts that get none.

    A host that does not say how many slots it has takes all that are left.
    """
    places = []
    for host in hosts:
        count = min(ranks, host.slots or ranks)
        if count:
            places.append((host.name, count))
        ranks -= count
    return tuple(places)


def format_shell_line(launch: Launch) -> str:
    """Write a launch as one line that can be pasted into a shell."""
    words = [word for name in launch.removed for word in ("-u", name)]
    words += [f"{name}={value}" for name, value in sorted(launch.variables.items())]
    return shlex.join(["env", *words, *launch.argv] if words else launch.argv)
