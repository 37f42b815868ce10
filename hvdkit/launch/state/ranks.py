"""The state of each rank of a job, from the reports of the agents, and which failure came first."""

from __future__ import annotations

import enum
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hvdkit.exit_codes import TRY_AGAIN
from hvdkit.launcher_channel import (
    CHANGING,
    CHECKPOINTED,
    FIRST_AWAITED,
    LONE,
    READY,
    TRAINED,
    InitCall,
    Totals,
    parse_init_call,
    parse_totals,
    parse_value,
)

# A rank that ended because it lost a peer prints such a line; a rank that failed otherwise is the cause.
_LOST_PEER = ("RankLostError", "*** An error occurred in Socket closed")
# The exit code that Open MPI gives a rank that has lost a connection; it does not always print why.
_LOST_PEER_CODE = 14
_SAME_MOMENT_S = 0.3
_SHELLS_SIGNAL = 128
_MOST_KEYS = 1000
_HINTS = {
    signal.SIGKILL: ", often because the system is out of memory (see dmesg there)",
    signal.SIGSEGV: ", a memory fault in compiled code (PYTHONFAULTHANDLER=1 shows where)",
    signal.SIGBUS: ", often because /dev/shm or a disk is full (see df there)",
    signal.SIGABRT: ", a failed check in compiled code (PYTHONFAULTHANDLER=1 shows where)",
}
# Unlike a traceback, faulthandler's dump has no comma after the line's number.
_FAULTHANDLER = re.compile(r'^Fatal Python error: |File ".*", line \d+ in ')


@dataclass(frozen=True)
class Start:
    """The command of a rank was started."""

    pid: int
    threads: str  # OMP_NUM_THREADS
    cpus: str  # CPUs that it may run on, such as "0-3,8"
    bound: bool  # hvdkit bound it to them


@dataclass(frozen=True)
class End:
    """The command of a rank has ended."""

    code: int
    signal: int = 0  # the signal that killed it; 0 if it exited
    ended_by: str = ""  # what ended it; "" if it ended by itself
    tail: tuple[str, ...] = ()  # its last lines, of stderr if it printed any
    time: float = 0.0  # by the clock of its host
    tail_of_stderr: bool = False

    @property
    def failed(self) -> bool:
        """Did it end by itself, with an error?"""
        return self.code != 0 and not self.ended_by

    @property
    def killed(self) -> bool:
        """Did a signal end it, or a process that it started? Shells report the latter by their exit code."""
        return bool(self.signal) or self.code > _SHELLS_SIGNAL

    @property
    def secondary_failure(self) -> bool:
        """Did it end because it lost another rank?"""
        return self.code == _LOST_PEER_CODE or any(word in line for line in self.tail for word in _LOST_PEER)


class Phase(enum.Enum):
    """The phases of a rank between its start and its end."""

    STARTING = "its agent has not registered"
    REGISTERED = "its agent waits for the start order"
    REPLACEMENT = "started by other ranks in place of a lost one, and not yet taken into the job"
    RUNNING = "its command runs"
    READY = "it has joined the other ranks"
    CHANGING = "it waits for the other ranks, to form a new world with them"
    ENDED = "its command has ended"
    LOST = "its agent disconnected without reporting an end"
    LEFT_BEHIND = "the other ranks continue without it"


#: Phases of ranks that the job does not wait for.
_OUTSIDE = (Phase.REPLACEMENT, Phase.LEFT_BEHIND)
_FINISHED = (Phase.ENDED, Phase.LOST)


@dataclass
class RankState:
    """The state of a rank, from reports. Times are of Ranks.clock."""

    phase: Phase = Phase.STARTING
    host: str = ""  # the host's own name; "" until its agent has registered
    joined: bool = False  # it has been in the world of all ranks: in hvd.init(), or by replacing a lost rank
    lone: bool = False  # it has used a framework, and joined no other rank
    start: Start | None = None
    end: End | None = None
    finished_s: float = 0.0  # when it ended or was lost
    paused_by: int = 0  # the signal that has stopped its command; 0 while it runs
    paused_s: float = 0.0  # time of the stop
    changing_s: float = 0.0  # start of its wait for the others, in the phase CHANGING
    init_call: InitCall | None = None  # it waits in hvd.init()
    init_called_s: float = 0.0  # time of that call
    killed_by_hvdrun: bool = False  # it hung, and the others continue without it
    silent: bool = False  # its host does not answer, though its connection was not closed
    totals: Totals | None = None  # sums of its last report, for --metrics-port
    tampering: str = ""  # why its connection was closed: it received data that its agent did not send
    unanswered_s: float = 0.0  # time after which it was given up, because its agent did not answer; 0 if it was not


@dataclass
class Ranks:
    """All ranks of a job, by their number. size: ranks that the job starts with; replacements have higher numbers."""

    size: int
    clock: Callable[[], float] = time.monotonic
    training_ended: bool = False
    checkpointed: bool = False  # some of the training is on a disk
    first_awaited: int = 0  # ranks with a smaller number that have not joined are not waited for
    logged: dict[str, float] = field(default_factory=dict)  # the last value of each key of hvd.track()
    states: dict[int, RankState] = field(init=False)

    def __post_init__(self) -> None:
        self.states = {rank: RankState() for rank in range(self.size)}

    # Reports of agents

    def register(self, rank: int, host: str, *, replaces: bool = False) -> None:
        """Record that a rank's agent has connected. replaces: other ranks started it in place of a lost one."""
        self.states[rank] = RankState(Phase.REPLACEMENT if replaces else Phase.REGISTERED, host)

    def admit(self, rank: int) -> None:
        """Record that hvdrun starts a replacement."""
        self.states[rank].phase = Phase.REGISTERED

    def start(self, rank: int, start: Start) -> None:
        """Record that a rank's command runs."""
        state = self._running(rank)
        if state is not None:
            state.phase, state.start = Phase.RUNNING, start

    def pause(self, rank: int, number: int) -> None:
        """Record the signal that has stopped a rank's command; 0 when it continues."""
        state = self._running(rank)
        if state is not None:
            state.paused_by, state.paused_s = number, self.clock()

    def hear(self, rank: int, messages: Sequence[str]) -> None:
        """Record a rank's messages, see hvdkit.launcher_channel."""
        self.training_ended = self.training_ended or TRAINED in messages
        self.checkpointed = self.checkpointed or CHECKPOINTED in messages
        state = self._running(rank)
        if state is None:
            return
        for message in messages:
            call = parse_init_call(message)
            if (totals := parse_totals(message)) is not None:
                state.totals = totals
            elif (value := parse_value(message)) is not None:
                self._log(*value)
            elif call is not None:
                state.init_call, state.init_called_s = call, self.clock()
            elif message == READY:
                state.phase, state.joined, state.init_call = Phase.READY, True, None
            elif message == LONE:
                state.lone = True
            elif message == CHANGING:
                state.phase, state.changing_s = Phase.CHANGING, self.clock()
            elif message.startswith(FIRST_AWAITED) and message[len(FIRST_AWAITED) :].isdecimal():
                self.first_awaited = max(self.first_awaited, int(message[len(FIRST_AWAITED) :]))

    def _log(self, key: str, value: float) -> None:
        if key in self.logged or len(self.logged) < _MOST_KEYS:
            self.logged[key] = value

    def end(self, rank: int, end: End) -> None:
        """Record how a rank's command ended, unless the others have continued without it."""
        state = self._running(rank)
        if state is not None:
            state.phase, state.end, state.finished_s = Phase.ENDED, end, self.clock()

    def lose(self, rank: int) -> None:
        """Record that a rank's agent has disconnected; without a report of its end the rank is lost."""
        state = self._running(rank)
        if state is not None:
            state.phase, state.finished_s = Phase.LOST, self.clock()

    def mark_tampered(self, rank: int, problem: str) -> None:
        """Record that a rank's connection is closed because it received data that its agent did not send."""
        state = self._running(rank)
        if state is not None:
            state.tampering = state.tampering or problem

    def give_up(self, rank: int, unanswered_s: float) -> None:
        """Record that a rank's connection is closed because its agent has not answered for so long."""
        state = self._running(rank)
        if state is not None:
            state.unanswered_s = unanswered_s

    def mark_unreachable(self, *ranks: int) -> None:
        """Record ranks whose hosts do not answer, though their connections were not closed."""
        for rank in ranks:
            state = self.states.get(rank)
            if state is not None and state.phase not in (*_OUTSIDE, Phase.ENDED):
                state.silent = True

    def continue_without(self, rank: int) -> None:
        """Record that the other ranks continue without a rank."""
        state = self.states[rank]
        self.states[rank] = RankState(Phase.LEFT_BEHIND, state.host if state.phase is Phase.LOST else "")
        for other in self.states.values():  # they now wait for one rank less
            if other.phase is Phase.CHANGING:
                other.changing_s = self.clock()

    def _running(self, rank: int) -> RankState | None:
        """Return the state of an unfinished rank of the job; None for other ranks, whose late reports may arrive."""
        state = self.states.get(rank)
        return None if state is None or state.phase in (*_OUTSIDE, *_FINISHED) else state

    # Sets of ranks

    def in_phase(self, *phases: Phase) -> set[int]:
        """The ranks in one of these phases."""
        return {rank for rank, state in self.states.items() if state.phase in phases}

    @property
    def expected(self) -> set[int]:
        """The ranks that the job consists of now."""
        return {rank for rank, state in self.states.items() if state.phase not in _OUTSIDE}

    @property
    def hosts(self) -> dict[int, str]:
        """The hosts of the ranks whose agents have registered, by the hosts' own names."""
        return {rank: one.host for rank, one in self.states.items() if one.host and one.phase is not Phase.LEFT_BEHIND}

    @property
    def ended(self) -> dict[int, End]:
        """The ends of the commands that have ended, by rank."""
        return {rank: state.end for rank, state in self.states.items() if state.end is not None}

    @property
    def lost(self) -> list[int]:
        """The ranks whose agents disconnected without reporting an end."""
        return sorted(self.in_phase(Phase.LOST))

    @property
    def paused(self) -> set[int]:
        """The ranks whose commands a signal has stopped."""
        return {rank for rank, state in self.states.items() if state.paused_by and self._running(rank) is not None}

    @property
    def left_behind(self) -> set[int]:
        """The ranks that the others continued without."""
        return self.in_phase(Phase.LEFT_BEHIND)

    @property
    def joined(self) -> set[int]:
        """The ranks that have joined the others."""
        return {rank for rank, state in self.states.items() if state.joined}

    @property
    def members(self) -> set[int]:
        """The ranks that join each other in hvd.init(); a replacement once it has joined."""
        return {rank for rank in self.expected if rank < self.size or self.states[rank].joined}

    @property
    def all_joined(self) -> bool:
        """Have all ranks joined that the job was started with, as far as they remain?"""
        return all(self.states[rank].joined for rank in self.expected if rank < self.size)

    @property
    def lone(self) -> set[int]:
        """The ranks that have used a framework, and joined no other rank."""
        return {rank for rank, state in self.states.items() if state.lone and not state.joined}

    # Conclusions

    @property
    def saved(self) -> bool:
        """Have ranks saved and ended, for a restart, without a failure of another rank?"""
        others = [end for end in self.ended.values() if end.code != TRY_AGAIN]
        return len(others) < len(self.ended) and not any(end.failed and not end.secondary_failure for end in others)

    @property
    def finished(self) -> bool:
        """Have all ranks ended, or has a member ended in such a way that the others cannot continue?"""
        members, ended = self.members, self.ended
        failed = any(end.code not in (0, TRY_AGAIN) for rank, end in ended.items() if rank in members)
        return failed or not members.isdisjoint(self.lost) or len(ended) == len(self.hosts)

    @property
    def all_ended(self) -> bool:
        """Have all started ranks ended?"""
        return self.hosts.keys() <= self.ended.keys() | set(self.lost)

    @property
    def succeeded(self) -> bool:
        """Have all ranks reported an end with exit code 0?"""
        ended = self.ended
        return ended.keys() == self.expected and all(end.code == 0 for end in ended.values())

    @property
    def failures(self) -> list[int]:
        """The ranks that failed by themselves or were lost, the likeliest cause first."""
        failed = [rank for rank, end in self.ended.items() if end.failed] + self.lost
        finished_s = [state.finished_s for state in self.states.values() if state.phase in _FINISHED]
        one_host = len(set(self.hosts.values())) == 1
        culprits_s = [self.states[rank].finished_s for rank, end in self.ended.items() if _failed_by_itself(end)]

        def order(rank: int) -> tuple[int, float, float]:
            state = self.states[rank]
            moment = state.finished_s
            # Clocks of different hosts cannot be compared; reports of the same moment from one host can.
            if one_host and moment - min(finished_s) < _SAME_MOMENT_S:
                moment = min(finished_s)
            if state.end is not None:
                rating = 2 if state.end.secondary_failure or state.end.code == TRY_AGAIN else 0
                return rating, moment, state.end.time
            # Some launchers (MPICH's) kill all agents the moment that a rank ends with an error.
            rating = int(any(culprit_s < state.finished_s + _SAME_MOMENT_S for culprit_s in culprits_s))
            return rating, moment, float("inf")

        return sorted(failed, key=order)

    @property
    def cause_is_certain(self) -> bool:
        """Is the first failure certainly the cause, because no other failure explains it?"""
        failures = self.failures
        end = self.states[failures[0]].end if failures else None
        return end is not None and not end.secondary_failure

    @property
    def partitioned(self) -> list[int]:
        """The ranks that were lost with their hosts or fell silent, if nothing else failed before."""
        silent = [rank for rank, state in self.states.items() if state.silent and state.end is None]
        first_s = min((self.states[rank].finished_s for rank in self.lost), default=0.0)
        # The launcher killed the ranks that were lost later, when it ended the job.
        gone = silent or [rank for rank in self.lost if self.states[rank].finished_s < first_s + _SAME_MOMENT_S]
        elsewhere = set(self.hosts.values()) - {self.states[rank].host for rank in gone}
        return sorted(gone) if elsewhere and not any(map(_failed_by_itself, self.ended.values())) else []

    @property
    def lost_hosts(self) -> set[str]:
        """The hosts, by their own names, that lost all their ranks while other hosts did not."""
        gone = {*self.partitioned, *(rank for rank in self.left_behind if self.states[rank].host)}
        alive = {host for rank, host in self.hosts.items() if rank not in gone}
        return {self.states[rank].host for rank in gone} - alive


def _failed_by_itself(end: End) -> bool:
    return end.failed and not end.secondary_failure


def explain_exit(code: int, number: int, tail: Sequence[str] = ()) -> str:
    """Describe an end. code: the exit code. number: the signal, 0 for none. tail: the last lines of output."""
    if number:
        hint = _HINTS.get(signal.Signals(number), "") if number in set(signal.Signals) else ""
        if "PYTHONFAULTHANDLER" in hint and any(_FAULTHANDLER.search(line) for line in tail):
            hint = hint.partition(" (")[0]
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return f"was killed by {name}{hint}"
    return f"failed with exit code {code}"


def describe_loss(ranks: Ranks, rank: int) -> str:
    """Describe which rank failed or was lost, and how."""
    state = ranks.states[rank]
    who = name_rank(ranks, rank)
    if state.tampering:
        return f"{who} was lost: {state.tampering}. A process on the way to its host may be altering the connection"
    if state.unanswered_s:
        what = f"its agent has not answered for {state.unanswered_s:.0f} s, though its host has"
        return f"{who} was lost: {what}; it is stopped (SIGSTOP), or waits for a file system"
    if state.end is None:
        return f"{who} was lost: the connection to its agent has broken, or its host does not answer"
    if state.killed_by_hvdrun and state.end.signal == signal.SIGKILL:
        return f"{who} was killed by hvdrun after --elastic-hang-timeout-s"
    return f"{who} {explain_exit(state.end.code, state.end.signal, state.end.tail)}"


def name_rank(ranks: Ranks, rank: int) -> str:
    """Write "rank 1 on node2"."""
    return f"rank {rank} on {ranks.states[rank].host}"


def count_ranks(number: int) -> str:
    """Write "1 rank", or "3 ranks"."""
    return "1 rank" if number == 1 else f"{number} ranks"
