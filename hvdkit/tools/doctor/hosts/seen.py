"""What was seen of several hosts and between them, as data."""

from __future__ import annotations

from dataclasses import dataclass

from hvdkit.tools.doctor.facts import Facts

#: A sum may take this many times what the network would allow, and this many seconds more, before it is called slow.
_FACTOR, _SLACK_S = 3.0, 0.1


@dataclass(frozen=True)
class Failure:
    """Why there is no agent. status: of ssh or srun, None if it was ended after a time; said: what it wrote."""

    status: int | None
    said: str


@dataclass(frozen=True)
class Seen:
    """One host of the job.

    name: as it is listed. slots: 0 if the list does not say. offset_s: how far its clock is ahead of this host's;
    error_s: what that may be wrong by. facts: None if there is no agent, and then failure says why.
    """

    name: str
    slots: int = 0
    facts: Facts | None = None
    failure: Failure | None = None
    offset_s: float = 0.0
    error_s: float = 0.0


@dataclass(frozen=True)
class Lookup:
    """What a name leads to on a host."""

    source: str
    name: str
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Reach:
    """A connection from a host to an address of another one.

    named: it is what the target's name leads to there; else it is one of the target's interfaces. problem: "" if the
    target's agent answered; else "timeout", "refused", "other" (somebody else answered), or what the system said.
    mbit: how fast data came, 0 if that was not measured.
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
    """A rank of the small job. cores: that it may use. visible: its CUDA_VISIBLE_DEVICES, None if not set."""

    rank: int
    host: str
    size: int
    cores: int
    visible: str | None = None


@dataclass(frozen=True)
class Allreduce:
    """The small job. bytes: summed. seconds: the median. expected_s: what the network between the hosts should give.

    error: why there is no time. remedy: the variable with which it then ran, or ran much faster; remedy_s: in how long.
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
    """All of it. here: the facts of the host that asks, which need not be one of the job's. via: ssh or srun.

    ssh_options: -p and -i with their values, where they were given.
    """

    here: Facts
    hosts: tuple[Seen, ...] = ()
    via: str = "ssh"
    ssh_options: tuple[str, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    reaches: tuple[Reach, ...] = ()
    logins: tuple[Login, ...] = ()
    allreduce: Allreduce | None = None
    seconds: float = 0.0

    @property
    def answering(self) -> list[tuple[str, Facts]]:
        """Names and facts of the hosts that have an agent."""
        return [(host.name, host.facts) for host in self.hosts if host.facts is not None]
