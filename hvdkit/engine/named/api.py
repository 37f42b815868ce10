"""The interface of an engine: named operations among the ranks of one group."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from hvdkit.engine.named.joining import Joining
from hvdkit.engine.named.operation import Action, Announcement, Operation
from hvdkit.engine.observe.stragglers import Window
from hvdkit.errors import DuplicateNameError
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import Buffer

#: In the names of operations without one, before their number.
UNNAMED = ".noname."
#: What steps that have no name are counted as.
STEP = "step"
SHUT_DOWN = "hvdkit was shut down, or the process set was removed. Call hvd.init() or add_process_set() again."


class Engine(ABC):
    """Named operations among the ranks of a transport; opened and closed by all of them together.

    hosts: of each rank, "" where that is not known. ranks: of each rank, its number in the world. job_ranks: see World.

    transport: for steps of several operations. joining: what this rank does for the others when it has joined.
    takes_tensors: may buffers be a framework's tensors, on any device? thread: the engine's own, which ends after
    leave(); None if it has none. most_names: that operations without one take in turns; 0 for a new one each time.
    notice_s: after how many seconds a wait that is no operation is announced with submit() and withdraw(), so that the
    first rank can report who waits, and who is missing. report_window: tells it how long this rank waited in some
    rounds of a plan. Both are None where the engine reports no stalls.
    """

    transport: Transport
    joining: Joining
    takes_tensors: bool
    thread: threading.Thread | None = None
    most_names = 0
    notice_s: float | None = None
    report_window: Callable[[Window], None] | None = None

    def __init__(self, hosts: Sequence[str], ranks: Sequence[int], job_ranks: Sequence[int] | None = None) -> None:
        self.ranks = list(ranks)
        self._hosts, self._job_ranks = hosts, job_ranks
        self._counters: dict[str, int] = {}
        self._counting = threading.Lock()

    @property
    @abstractmethod
    def stopped(self) -> bool:
        """Have all ranks been stopped for an error of one? Then they are in different collectives."""

    def who(self, rank: int) -> str:
        """Name a rank of this engine for a message."""
        places = [f"job rank {self._job_ranks[rank]}"] if self._job_ranks else []
        places += [f"host {self._hosts[rank]}"] if self._hosts[rank] else []
        return f"rank {self.ranks[rank]}" + (f" ({', '.join(places)})" if places else "")

    def duplicate(self, name: str) -> DuplicateNameError:
        """The error of an operation whose name another one on this rank still has."""
        return DuplicateNameError(
            f"{name} is still running on {self.who(self.transport.rank)}. Give operations that run at the same time "
            "different names, or call synchronize() on the first one before."
        )

    def make_name(self, kind: str) -> str:
        """A name for an operation without one: the n-th of its kind here and so on every rank."""
        number = self.count(kind + UNNAMED)
        return f"{kind}{UNNAMED}{number % self.most_names if self.most_names else number}"

    def count(self, kind: str) -> int:
        """How many of a kind there have been with this one, from 1; the same on every rank where the order is."""
        with self._counting:
            number = self._counters[kind] = self._counters.get(kind, 0) + 1
        return number

    def count_anew(self) -> None:
        """Count operations and steps without names from 1 again, where all ranks have come to the end of theirs."""
        with self._counting:
            for kind in [kind for kind in self._counters if kind == STEP or kind.endswith(UNNAMED)]:
                del self._counters[kind]

    @abstractmethod
    def submit(self, name: str, asked: Announcement, buffers: Sequence[Buffer]) -> Operation:
        """Begin an operation; it is done some time after every rank has begun it.

        buffers: left alone by the caller until then.
        Raises DuplicateNameError if an operation of this name is still under way here, HorovodInternalError if the
        engine has failed, TypeError for what it cannot do with a dtype.
        """

    @abstractmethod
    def do(
        self, name: str, asked: Announcement, buffers: Sequence[Buffer], *, action: Action | None = None
    ) -> Operation:
        """Begin an operation and return when it is done; raises what it failed with, and what submit() raises.

        action: see Operation.
        """

    def withdraw(self, name: str) -> None:  # noqa: B027  nothing, without a notice_s
        """Take back an operation without buffers, if it is still under way."""

    @abstractmethod
    def wait(self, operation: Operation) -> None:
        """Return when the operation is done; raises what it failed with."""

    @abstractmethod
    def drive(self) -> bool:
        """Do what can be done now; True if anything moved."""

    @abstractmethod
    def join(self) -> Operation:
        """Begin to take part in the others' operations, and plans, with zeros until all ranks have joined."""

    @abstractmethod
    def leave(self, why: str) -> None:
        """Tell the others that this rank takes no further part; not collective. why: follows its name."""

    @abstractmethod
    def close(self, *, idle: bool = True) -> None:
        """Free what is the engine's, the transport too; collective. idle: see Transport.close."""
