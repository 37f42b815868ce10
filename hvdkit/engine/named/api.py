"""The interface of an engine: named operations among the ranks of one group."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from hvdkit.engine.named.joining import Joining
from hvdkit.engine.named.operation import Action, Operation, OperationRequest
from hvdkit.engine.observe.stragglers import Window
from hvdkit.errors import DuplicateNameError
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import Buffer

#: Part of the generated name of an unnamed operation, before its number.
UNNAMED = ".noname."
#: The kind under which unnamed collective steps are counted.
STEP = "step"
SHUT_DOWN = "hvdkit was shut down, or the process set was removed. Call hvd.init() or add_process_set() again."


class Engine(ABC):
    """Named operations among the ranks of a transport; opened and closed by all of them together.

    Arguments:
    hosts: the host of each rank; "" if it is unknown.
    ranks: the number of each rank in the world.
    job_ranks: see World.

    Attributes:
    transport: connects the group's ranks; collective steps use it for their collectives.
    joining: this rank's contributions to the others' operations after it has joined.
    takes_tensors: May buffers be a framework's tensors, on any device?
    thread: the engine's own, which ends after leave(); None if it has none.
    most_names: number of names that unnamed operations use in turn; 0 for a new name each time.
    notice_s: seconds after which a wait outside of operations is announced with submit(), and later withdraw(), so that
        the first rank can report which ranks wait and which are missing; None if the engine reports no stalls.
    report_window: reports to the first rank how long this rank waited in some rounds of a plan; None if the engine
        reports no stalls.
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
        """Have all ranks been stopped because of an error on one rank? Then they are in different collectives."""

    def who(self, rank: int) -> str:
        """Name a rank of this engine for a message."""
        places = [f"job rank {self._job_ranks[rank]}"] if self._job_ranks else []
        places += [f"host {self._hosts[rank]}"] if self._hosts[rank] else []
        return f"rank {self.ranks[rank]}" + (f" ({', '.join(places)})" if places else "")

    def duplicate(self, name: str) -> DuplicateNameError:
        """Make the error of an operation with the name of another operation that is under way on this rank."""
        return DuplicateNameError(
            f"{name} is still running on {self.who(self.transport.rank)}. Give operations that run at the same time "
            "different names, or call synchronize() on the first one before."
        )

    def make_name(self, kind: str) -> str:
        """Make a name for an unnamed operation: its kind and a counter per kind, so all ranks make the same name."""
        number = self.count(kind + UNNAMED)
        return f"{kind}{UNNAMED}{number % self.most_names if self.most_names else number}"

    def count(self, kind: str) -> int:
        """Count one more of a kind. Returns the count, from 1; equal on all ranks that do these in the same order."""
        with self._counting:
            number = self._counters[kind] = self._counters.get(kind, 0) + 1
        return number

    def count_anew(self) -> None:
        """Restart the counts of unnamed operations and steps at 1, after all ranks have joined."""
        with self._counting:
            for kind in [kind for kind in self._counters if kind == STEP or kind.endswith(UNNAMED)]:
                del self._counters[kind]

    @abstractmethod
    def submit(self, name: str, request: OperationRequest, buffers: Sequence[Buffer]) -> Operation:
        """Begin an operation; it is done some time after every rank has begun it.

        name: of the operation. request: this rank's. buffers: the caller must not touch them until the operation
        is done.
        Raises DuplicateNameError if an operation of this name is still under way here, HorovodInternalError if the
        engine has failed, TypeError for an operation that the engine does not support for a dtype.
        """

    @abstractmethod
    def do(
        self, name: str, request: OperationRequest, buffers: Sequence[Buffer], *, action: Action | None = None
    ) -> Operation:
        """Begin an operation and return when it is done. Raises the operation's error, and what submit() raises.

        name: of the operation.
        request: this rank's.
        buffers: see Operation.
        action: see Operation.
        """

    def withdraw(self, name: str) -> None:  # noqa: B027  nothing, without a notice_s
        """Cancel an operation without buffers, if it is still under way."""

    @abstractmethod
    def wait(self, operation: Operation) -> None:
        """Return when the operation is done. Raises the operation's error."""

    @abstractmethod
    def drive(self) -> bool:
        """Do the work that needs no wait. Returns True if there was progress."""

    @abstractmethod
    def join(self) -> Operation:
        """Join: take part with zeros in the others' operations and plans until all ranks have joined."""

    @abstractmethod
    def leave(self, why: str) -> None:
        """Notify the other ranks that this rank has stopped; not collective. why: follows its name in messages."""

    @abstractmethod
    def close(self, *, idle: bool = True) -> None:
        """Free the engine's resources, including the transport; collective. idle: see Transport.close."""
