"""What is known of each rank: how it has started and ended, or that it was lost; and how to put that into words."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdkit.exit_codes import TRY_AGAIN
from hvdkit.launch.coming import ComingRanks
from hvdkit.launcher_channel import CHANGES, KEPT, OVER, PAST, READY

# A rank that only lost its peer ends with this error; whoever failed otherwise is the cause.
_AFTERMATH = ("RankLostError", "*** An error occurred in Socket closed")
# Open MPI's own end of a rank that has lost a connection; it does not always say so on the rank's stderr.
_AFTERMATH_CODE = 14
_SAME_MOMENT_S = 0.3
_SHELLS_SIGNAL = 128
_HINTS = {
    signal.SIGKILL: ", often the system being out of memory",
    signal.SIGSEGV: ", a fault in compiled code",
    signal.SIGBUS: ", often /dev/shm or a disk being full",
    signal.SIGABRT: ", a failed check in compiled code",
}


@dataclass(frozen=True)
class Start:
    """A rank's command has started.

    threads: its OMP_NUM_THREADS. cpus: that it may run on, as "0-3,8". bound: to these by hvdkit.
    """

    pid: int
    threads: str
    cpus: str
    bound: bool


@dataclass(frozen=True)
class End:
    """A rank's command has ended.

    signal: what killed it; 0 if it exited.
    told: why it was ended; "" if it ended by itself.
    tail: its last lines, of stderr if there were any.
    time: by its host's clock.
    tail_of_stderr: are the last lines of stderr?
    """

    code: int
    signal: int = 0
    told: str = ""
    tail: tuple[str, ...] = ()
    time: float = 0.0
    tail_of_stderr: bool = False

    @property
    def failed(self) -> bool:
        """It ended badly, and nobody had asked it to end."""
        return self.code != 0 and not self.told

    @property
    def killed(self) -> bool:
        """A signal ended it, or what it had started itself: shells say so by their exit code."""
        return bool(self.signal) or self.code > _SHELLS_SIGNAL

    @property
    def aftermath(self) -> bool:
        """It ended because another rank had gone."""
        return self.code == _AFTERMATH_CODE or any(word in line for line in self.tail for word in _AFTERMATH)


@dataclass
class Ranks:
    """What the agents have reported so far. A rank whose agent went away without a report is lost.

    paused: the signal that has stopped a rank's command, until it goes on.
    silent: those of which nothing more is heard. expected: those that the job is made of now.
    Where ranks may be outlived: ready: those that have joined each other. over: the training of one of these is.
    outlived: how many the others went on without. past: ranks with a smaller number that are not ready are not waited
    for. stopped, changing: since when a rank is paused, and since when it is on its way to other ranks. gone: those
    outlived whose agents were lost, and their hosts. kept: something of the training is on a disk. coming: those that
    wait in hvd.init(). suspected: what was wrong with what came over the connections of ranks, which ended these.
    """

    size: int
    hosts: dict[int, str] = field(default_factory=dict)
    started: dict[int, Start] = field(default_factory=dict)
    ended: dict[int, End] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    paused: dict[int, int] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)
    ready: set[int] = field(default_factory=set)
    over: bool = False
    outlived: int = 0
    past: int = 0
    stopped: dict[int, float] = field(default_factory=dict)
    changing: dict[int, float] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)
    kept: bool = False
    coming: ComingRanks = field(default_factory=ComingRanks)
    suspected: dict[int, str] = field(default_factory=dict)
    expected: set[int] = field(init=False)
    _arrival: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.expected = set(range(self.size))

    def join(self, rank: int) -> None:
        """Note a rank that the job has taken in, in place of one that was lost."""
        self.expected.add(rank)

    def hear(self, rank: int, words: Sequence[str]) -> None:
        """Note what a rank says of how far it is."""
        if rank in self.expected:
            self.coming.hear(rank, words)
        for word in words if rank in self.expected else ():
            if word == READY:
                self.ready.add(rank)
                self.changing.pop(rank, None)
            elif word == CHANGES:
                self.changing[rank] = time.monotonic()
            elif word.startswith(PAST) and word[len(PAST) :].isdecimal():
                self.past = max(self.past, int(word[len(PAST) :]))
        self.over = self.over or OVER in words
        self.kept = self.kept or KEPT in words

    @property
    def members(self) -> set[int]:
        """The ranks that meet in hvd.init(); of those that came later, such as have been taken in."""
        return {rank for rank in self.expected if rank < self.size or rank in self.ready}

    @property
    def begun(self) -> bool:
        """All ranks that the job was started with, or what is left of them, have joined each other."""
        return all(rank in self.ready for rank in self.expected if rank < self.size)

    def outlive(self, rank: int) -> None:
        """Note that the others go on without a rank, of which nothing is left."""
        self.expected.discard(rank)
        self.ready.discard(rank)
        self.outlived += 1
        if rank in self.lost:
            self.gone[rank] = self.hosts[rank]
        self.coming.forget(rank)
        books = (self.hosts, self.started, self.ended, self.paused, self.stopped, self.changing, self._arrival)
        self.suspected.pop(rank, None)
        for book in books:
            book.pop(rank, None)
        self.changing = dict.fromkeys(self.changing, time.monotonic())  # who have now one less to wait for
        self.lost = [one for one in self.lost if one != rank]
        self.silent = [one for one in self.silent if one != rank]

    def start(self, rank: int, start: Start) -> None:
        """Note that a rank's command runs."""
        if rank in self.expected:
            self.started[rank] = start

    def pause(self, rank: int, number: int) -> None:
        """Note that a signal has stopped a rank's command, or (0) that it goes on."""
        if number:
            self.paused[rank], self.stopped[rank] = number, time.monotonic()
        else:
            self.paused.pop(rank, None)
            self.stopped.pop(rank, None)

    def end(self, rank: int, end: End) -> None:
        """Note how a rank's command ended, unless the others have gone on without it before."""
        if rank not in self.expected:
            return
        self.ended[rank] = end
        self._arrival[rank] = time.monotonic()

    def lose(self, rank: int) -> None:
        """Note that a rank's agent is gone."""
        if rank in self.expected and rank not in self.ended:
            self.lost.append(rank)
            self._arrival[rank] = time.monotonic()

    def suspect(self, rank: int, problem: str) -> None:
        """Note that a rank's connection is ended because what came over it was not its agent's."""
        if rank in self.expected and rank not in self.ended:
            self.suspected.setdefault(rank, problem)

    def fall_silent(self, *ranks: int) -> None:
        """Note ranks of which nothing more is heard, though their connection has not been closed."""
        self.silent = sorted({*self.silent, *ranks} & self.expected - self.ended.keys())

    @property
    def saved(self) -> bool:
        """Ranks have saved, and ended so as to be started again; whatever became of the others, none has failed."""
        others = [end for end in self.ended.values() if end.code != TRY_AGAIN]
        return len(others) < len(self.ended) and not any(end.failed and not end.aftermath for end in others)

    @property
    def settled(self) -> bool:
        """Nothing is to be waited for: all ranks have ended, or one of them so that the others cannot go on.

        They do without one that has not been taken in.
        """
        members = self.members
        failed = any(end.code not in (0, TRY_AGAIN) for rank, end in self.ended.items() if rank in members)
        return failed or not members.isdisjoint(self.lost) or len(self.ended) == len(self.hosts)

    @property
    def all_well(self) -> bool:
        """Every rank has reported its end, with exit code 0."""
        return self.ended.keys() == self.expected and all(end.code == 0 for end in self.ended.values())

    @property
    def failures(self) -> list[int]:
        """The ranks that failed by themselves or were lost, the likeliest cause first."""
        failed = [rank for rank, end in self.ended.items() if end.failed] + self.lost
        return sorted(failed, key=self._order)

    @property
    def cut_off(self) -> list[int]:
        """The ranks that were lost or fell silent, if that is a matter of their hosts and nothing came before it."""
        first = min((self._arrival[rank] for rank in self.lost), default=0.0)
        # What was lost later was killed by the launcher, which ended the others.
        gone = self.silent or sorted(rank for rank in self.lost if self._arrival[rank] < first + _SAME_MOMENT_S)
        elsewhere = set(self.hosts.values()) - {self.hosts[rank] for rank in gone}
        by_itself = any(end.failed and not end.aftermath for end in self.ended.values())
        return gone if elsewhere and not by_itself else []

    @property
    def cause_is_sure(self) -> bool:
        """The first failure is one that needs no other to explain it."""
        failures = self.failures
        return bool(failures) and failures[0] in self.ended and not self.ended[failures[0]].aftermath

    @property
    def lost_hosts(self) -> set[str]:
        """The hosts, as they call themselves, of which all ranks were lost while others were not."""
        gone = {**self.gone, **{rank: self.hosts[rank] for rank in self.cut_off}}
        return set(gone.values()) - {host for rank, host in self.hosts.items() if rank not in gone}

    def _order(self, rank: int) -> tuple[int, float, float]:
        # Clocks of different hosts cannot be compared; reports of the same moment from one host can.
        end = self.ended.get(rank)
        moment = self._arrival[rank]
        if len(set(self.hosts.values())) == 1:
            first = min(self._arrival.values())
            moment = first if moment - first < _SAME_MOMENT_S else moment
        return self._likelihood(rank), moment, end.time if end else float("inf")

    def _likelihood(self, rank: int) -> int:
        if rank in self.ended:
            return 2 if self.ended[rank].aftermath or self.ended[rank].code == TRY_AGAIN else 0
        # Some launchers (MPICH's) kill all agents the moment a rank ends badly.
        moment = self._arrival[rank]
        culprits = (other for other, end in self.ended.items() if end.failed and not end.aftermath)
        return int(any(self._arrival[other] < moment + _SAME_MOMENT_S for other in culprits))


def explain_exit(code: int, number: int) -> str:
    """Put an end into words."""
    if number:
        hint = _HINTS.get(signal.Signals(number), "") if number in set(signal.Signals) else ""
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return f"was killed by {name}{hint}"
    return f"failed with exit code {code}"


def describe_loss(ranks: Ranks, rank: int) -> str:
    """Say which rank failed or was lost, and how."""
    end = ranks.ended.get(rank)
    place = f"rank {rank} on {ranks.hosts[rank]}"
    if rank in ranks.suspected:
        return (
            f"{place} was lost: {ranks.suspected[rank]}. Somebody between its host and this one may be reading and "
            "writing there"
        )
    return (
        f"{place} was lost: its agent, or its host, is gone"
        if end is None
        else f"{place} {explain_exit(end.code, end.signal)}"
    )


def count_ranks(number: int) -> str:
    """ "1 rank", or "3 ranks"."""
    return "1 rank" if number == 1 else f"{number} ranks"
