"""The ad hoc path: operations under a name, submitted from any thread in any order, done when all ranks have them.

Rank 0 of the group is told what every rank has, and tells all of them what is ready (negotiation.py). Whoever waits for
a result drives that; a thread does where nobody waits. So a rank that computes still takes part, and a rank that waits
does so without a detour through a thread.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Sequence
from typing import Any

from hvdkit.config import Config
from hvdkit.engine.execution import Operation, absent, execute
from hvdkit.engine.negotiation import AllJoined, Announcement, Answer, Coordinator, Failed, Ready
from hvdkit.engine.stall import Stalls, main_thread_stack
from hvdkit.engine.timeline import Timeline
from hvdkit.errors import DuplicateNameError, HorovodInternalError
from hvdkit.transport.base import Buffer, Transport
from hvdkit.transport.waiting import Waiting

_CACHE = 1024  # different operations that are known by number
_IDLE_S = 0.05  # how often a thread with nothing to do looks at the mail: to answer questions, and for who has left
_BUSY_S = 0.001  # the same while operations are under way


class NamedEngine:
    """Named operations among the ranks of a transport; opened and closed by all of them together.

    transport: this engine's alone. hosts: of each rank, and ranks: its number in the world, for messages.
    """

    def __init__(
        self, transport: Transport, config: Config, *, hosts: Sequence[str], ranks: Sequence[int], timeline: Timeline
    ) -> None:
        self.transport = transport
        self._limit_bytes = config.fusion_bytes
        self._hosts, self._ranks, self._timeline = hosts, ranks, timeline
        self._mail = transport.open_mailbox()
        self._coordinator = Coordinator(transport.size, self.who) if transport.rank == 0 else None
        self._stalls = Stalls(config, self.who)
        self._operations: dict[str, Operation] = {}
        self._outbox: list[tuple[str, Announcement]] = []
        self._join: Operation | None = None
        self._sent: dict[Announcement, int] = {}  # known to rank 0 by number
        self._told: dict[tuple[Any, ...], int] = {}  # on rank 0: parts of answers that all ranks know by number
        self._asked: list[list[Announcement]] = [[] for _ in range(transport.size)]
        self._heard: list[tuple[Any, ...]] = []
        self._failure: str | None = None
        self._submitting = threading.Lock()
        self._driving = threading.RLock()
        self._awake = threading.Event()
        self._closing = False
        self._counters: dict[str, int] = {}
        self._start_thread()

    def who(self, rank: int) -> str:
        """Name a rank of this engine for a message."""
        return f"rank {self._ranks[rank]} (host {self._hosts[rank]})"

    def _start_thread(self) -> None:
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        if self.transport.size > 1:
            self._thread = threading.Thread(target=self._run, name="hvdkit-named", daemon=True)
            self._thread.start()

    def make_name(self, kind: str) -> str:
        """A name for an operation without one: the n-th of its kind here and so on every rank."""
        with self._submitting:
            number = self._counters[kind] = self._counters.get(kind, 0) + 1
        return f"{kind}.noname.{number}"

    def submit(self, name: str, asked: Announcement, buffers: Sequence[Buffer], *, alone: bool = False) -> Operation:
        """Begin an operation; it is done some time after every rank has begun it.

        buffers: left alone by the caller until then. alone: the caller waits at once, so the thread need not wake up.
        Raises DuplicateNameError if an operation of this name is still under way here, HorovodInternalError if the
        engine has failed.
        """
        operation = Operation(name, asked, buffers)
        with self._submitting:
            if self._failure is not None:
                raise HorovodInternalError(self._failure)
            if name in self._operations:
                raise DuplicateNameError(
                    f"{name} is still under way on {self.who(self.transport.rank)}. Give operations that run at the "
                    f"same time different names, or synchronize() the first one before."
                )
            self._operations[name] = operation
            self._outbox.append((name, asked))
        self._timeline.begin(name, f"NEGOTIATE_{asked.kind.upper()}")
        if not alone and not self._awake.is_set():
            self._awake.set()
        return operation

    def join(self) -> Operation:
        """Begin to take part in the others' operations with zeros, until all ranks have joined."""
        operation = Operation("join", Announcement("join", ()), ())
        with self._submitting:
            if self._failure is not None:
                raise HorovodInternalError(self._failure)
            self._join = operation
            self._outbox.append(("", operation.asked))
        self._awake.set()
        return operation

    def wait(self, operation: Operation) -> None:
        """Return when the operation is done; raises what it failed with."""
        waiting = Waiting(self.transport.check)
        while not operation.done:
            if not self.drive():
                waiting.pause()
        if operation.error is not None:
            raise operation.error

    def drive(self) -> bool:
        """Send, receive and do what can be done now; True if anything moved."""
        with self._driving:
            moved = self._post()
            for rank, message in self._mail.receive():
                moved = True
                self._receive(rank, *pickle.loads(message))
            if self._coordinator is not None:
                self._stalls.look(self._coordinator, self._ask)
                answers = self._coordinator.take_answers()
                if answers:
                    moved = True
                    self._tell(answers)
            return moved

    def _post(self) -> bool:
        if not self._outbox:
            return False
        with self._submitting:
            outbox, self._outbox = self._outbox, []
        items: list[tuple[str, int, Announcement | None]] = []
        for name, asked in outbox:
            number = self._sent.get(asked, -1)
            if number >= 0:
                items.append((name, number, None))
                continue
            if len(self._sent) < _CACHE:
                number = self._sent[asked] = len(self._sent)
            items.append((name, number, asked))
        self._mail.send(0, pickle.dumps(("announce", items), pickle.HIGHEST_PROTOCOL))
        return True

    def _receive(self, rank: int, what: str, content: Any) -> None:
        if what == "announce":
            self._announced(rank, content)
        elif what == "answer":
            self._answered(content)
        elif what == "leave":
            assert self._coordinator is not None
            self._coordinator.leave(rank, content)
        elif what == "stack?":
            self._mail.send(rank, pickle.dumps(("stack", main_thread_stack())))
        elif what == "stack":
            self._stalls.hear(rank, content)
        elif what == "closed":
            self._fail(content)

    def _announced(self, rank: int, items: list[tuple[str, int, Announcement | None]]) -> None:
        assert self._coordinator is not None
        now, known = time.monotonic(), self._asked[rank]
        for name, number, asked in items:
            if asked is None:
                asked = known[number]
            elif number >= 0:
                known.append(asked)
            if asked.kind == "join":
                self._coordinator.join(rank)
            else:
                self._coordinator.announce(rank, name, asked, now)

    def _ask(self, rank: int) -> None:
        self._mail.send(rank, pickle.dumps(("stack?", None)))

    def _tell(self, answers: Sequence[Answer]) -> None:
        """Let every rank know, this one last, so that nobody waits for what it does."""
        items: list[Any] = []
        for answer in answers:
            if not isinstance(answer, Ready):
                items.append(answer)
                continue
            body = (answer.asked, answer.rows, answer.joined)
            number = self._told.get(body, -1)
            if number >= 0:
                items.append((answer.name, number, None))
                continue
            if len(self._told) < _CACHE:
                number = self._told[body] = len(self._told)
            items.append((answer.name, number, body))
        message = pickle.dumps(("answer", items), pickle.HIGHEST_PROTOCOL)
        for rank in range(self.transport.size - 1, -1, -1):
            self._mail.send(rank, message)

    def _answered(self, items: list[Any]) -> None:
        work: list[tuple[Ready, Operation]] = []
        for item in items:
            if isinstance(item, Failed):
                self._finish(item.name, HorovodInternalError(item.why))
            elif isinstance(item, AllJoined):
                self._do(work)
                work = []
                self._joined(item.last)
            else:
                name, number, body = item
                if body is None:
                    body = self._heard[number]
                elif number >= 0:
                    self._heard.append(body)
                ready = Ready(name, *body)
                self._timeline.end(name)
                work.append((ready, self._operations.get(name) or absent(ready)))
        self._do(work)

    def _do(self, work: Sequence[tuple[Ready, Operation]]) -> None:
        if not work:
            return
        try:
            execute(self.transport, work, limit_bytes=self._limit_bytes, span=self._timeline.span)
        except Exception as error:
            failure = error if isinstance(error, HorovodInternalError) else HorovodInternalError(str(error))
            for ready, _ in work:
                self._finish(ready.name, failure)
            self._fail(str(failure))
            if failure is error:
                raise
            raise failure from error
        for ready, _ in work:
            self._finish(ready.name, None)

    def _finish(self, name: str, error: Exception | None) -> None:
        with self._submitting:
            operation = self._operations.pop(name, None)
        if operation is not None:
            operation.error = error
            operation.done = True

    def _joined(self, last: int) -> None:
        join, self._join = self._join, None
        if join is not None:
            join.last_joined = last
            join.done = True

    def _fail(self, why: str) -> None:
        """Nothing can be done any more: tell all who wait, and who will come."""
        with self._submitting:
            self._failure = why
            waiting, self._operations = list(self._operations.values()), {}
            if self._join is not None:
                waiting.append(self._join)
        for operation in waiting:
            operation.error = HorovodInternalError(why)
            operation.done = True

    def _run(self) -> None:
        while not self._closing:
            self._awake.wait(_IDLE_S)
            self._awake.clear()
            if self._busy:
                time.sleep(_BUSY_S)  # operations come many at a time, and whoever waits for one needs no thread
            if self._driving.acquire(blocking=False):
                try:
                    while not self._closing and self.drive():
                        pass
                except HorovodInternalError:
                    return  # every operation has been told
                finally:
                    self._driving.release()
            if self._busy:
                self._awake.set()

    @property
    def _busy(self) -> bool:
        return bool(self._operations or self._outbox or self._join)

    def leave(self, why: str) -> None:
        """Tell the others that this rank takes no further part; not collective. why: follows its name."""
        self._closing = True
        why = f"{self.who(self.transport.rank)} {why}"
        if self.transport.size == 1 or os.getpid() != self._process:
            return
        if self._coordinator is None:
            self._mail.send(0, pickle.dumps(("leave", why)))
        else:
            for rank in range(1, self.transport.size):
                self._mail.send(rank, pickle.dumps(("closed", why)))

    def close(self) -> None:
        """Free what is the engine's, the transport too; collective."""
        self._closing = True
        self._awake.set()
        if self._thread is not None:
            self._thread.join()
        self._mail.close()
        self.transport.close()
