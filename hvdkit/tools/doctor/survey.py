"""The facts of several hosts and of the connections between them, as data."""

from __future__ import annotations

from dataclasses import dataclass

from hvdkit.launch.plan.network import HostInterfaces, find_shared_subnets, is_inside
from hvdkit.tools.doctor.facts import HostFacts

#: A sum may take this many times the network's time, and this many seconds more, before it counts as slow.
_FACTOR, _SLACK_S = 3.0, 0.1


@dataclass(frozen=True)
class Failure:
    """Why a host has no agent. status: of ssh or srun, None if it was ended after a time limit. said: its output."""

    status: int | None
    said: str


@dataclass(frozen=True)
class HostReport:
    """One host of the job.

    name: its name in the list of hosts.
    slots: 0 if the list does not give them.
    facts: None without an agent.
    failure: the reason if it has no agent.
    offset_s: how far its clock is ahead of this host's.
    error_s: the error of offset_s.
    """

    name: str
    slots: int = 0
    facts: HostFacts | None = None
    failure: Failure | None = None
    offset_s: float = 0.0
    error_s: float = 0.0


@dataclass(frozen=True)
class Lookup:
    """The addresses of a name on a host."""

    source: str
    name: str
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class ConnectionAttempt:
    """A connection from a host to an address of another one.

    source, target: the hosts.
    address: the address of the target.
    named: the source resolves the target's name to this address; else it is of one of the target's interfaces.
    problem: "" if the target's agent answered; else "timeout", "refused", "other" (another process answered), or the
        system's message.
    mbit: measured rate in Mbit/s, 0 if it was not measured.
    """

    source: str
    target: str
    address: str
    named: bool
    problem: str = ""
    mbit: float = 0.0


@dataclass(frozen=True)
class Login:
    """ssh from a host to another. failure: None if it works."""

    source: str
    target: str
    failure: Failure | None = None


@dataclass(frozen=True)
class Rank:
    """A rank of the small job.

    rank: its number.
    host: its host.
    size: size of its world.
    cores: number of cores that it may use.
    visible: its CUDA_VISIBLE_DEVICES, or the GPUs that the variables of another vendor show; None if not set.
    chosen: these variables as in a shell, "" for CUDA_VISIBLE_DEVICES.
    """

    rank: int
    host: str
    size: int
    cores: int
    visible: str | None = None
    chosen: str = ""


@dataclass(frozen=True)
class Allreduce:
    """The result of the small job.

    bytes: number of summed bytes.
    seconds: the median.
    expected_s: expected time over the network between the hosts.
    transport: its transport.
    ranks: its ranks.
    error: the reason if it gave no time.
    remedy: the variable with which it then ran, or ran much faster.
    remedy_s: its time with that variable.
    """

    bytes: int = 0
    seconds: float = 0.0
    expected_s: float = 0.0
    transport: str = ""
    ranks: tuple[Rank, ...] = ()
    error: str = ""
    remedy: str = ""
    remedy_s: float = 0.0

    @property
    def slow(self) -> bool:
        """Is it much slower than the network, even for busy hosts?"""
        return bool(self.expected_s) and self.seconds > _FACTOR * self.expected_s + _SLACK_S


@dataclass(frozen=True)
class Survey:
    """The whole survey.

    here: the facts of the host that runs doctor, which need not be one of the job's.
    hosts: the hosts of the job.
    via: "ssh" or "srun".
    ssh_options: -p and -i with their values, if they were given.
    lookups: addresses of names on the hosts.
    reaches: connections between the hosts.
    logins: ssh between the hosts.
    allreduce: the small job; None if it was not run.
    seconds: duration of the survey.
    """

    here: HostFacts
    hosts: tuple[HostReport, ...] = ()
    via: str = "ssh"
    ssh_options: tuple[str, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    reaches: tuple[ConnectionAttempt, ...] = ()
    logins: tuple[Login, ...] = ()
    allreduce: Allreduce | None = None
    seconds: float = 0.0

    @property
    def answering(self) -> dict[str, HostFacts]:
        """The facts of the hosts that have an agent, by name."""
        return {host.name: host.facts for host in self.hosts if host.facts is not None}


def addresses_of(facts: HostFacts) -> set[str]:
    """List a host's own addresses."""
    return {each.address for each in facts.machine.network.interfaces}


def subnets_of(facts: HostFacts) -> set[str]:
    """List the subnets of a host's own addresses."""
    return {each.subnet for each in facts.machine.network.interfaces}


def subnet_of(facts: HostFacts, address: str) -> str:
    """Find the subnet of one of a host's addresses; "" for another address."""
    return next((each.subnet for each in facts.machine.network.interfaces if each.address == address), "")


def find_common_subnets(survey: Survey) -> list[str]:
    """List the subnets in which every host reached all others that it tried, the fastest first."""
    hosts = survey.answering
    attempts = [each for each in survey.reaches if {each.source, each.target} <= hosts.keys()]
    pairs = {(each.source, each.target) for each in attempts}
    speeds = {}
    interfaces = {name: HostInterfaces(facts.machine.network.interfaces) for name, facts in hosts.items()}
    for subnet in find_shared_subnets(interfaces):
        inside = [each for each in attempts if not each.problem and is_inside(each.address, subnet)]
        if pairs == {(each.source, each.target) for each in inside}:
            speeds[subnet] = max((each.mbit for each in inside), default=0.0)
    return sorted(speeds, key=lambda subnet: -speeds[subnet])


def describe_subnet(survey: Survey, subnet: str) -> str:
    """Describe a subnet with the names of its interfaces."""
    names = dict.fromkeys(
        each.name
        for facts in survey.answering.values()
        for each in facts.machine.network.interfaces
        if each.subnet == subnet
    )
    return f"{subnet} ({', '.join(names)})"


def describe_common_network(survey: Survey) -> str:
    """Write the sentence that names the fastest network that all hosts share; "" if there is none."""
    subnets = find_common_subnets(survey)
    return f" All hosts reach one another on {describe_subnet(survey, subnets[0])}." if subnets else ""
