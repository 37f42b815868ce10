"""The ad hoc path: operations under a name, submitted from any thread in any order, done when all ranks have them.

Rank 0 of the group is told what every rank has, and tells all of them what is ready (negotiation.py). Whoever waits for
a result drives that; a thread does where nobody waits. So a rank that computes still takes part, and a rank that waits
does so without a detour through a thread.

Small operations that every rank waits for at once need none of that on a fast lane (fast_lane.py).
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from hvdkit.config import Config
from hvdkit.engine.announcement import Announcement, Ready
from hvdkit.engine.execution import Action, Operation, execute
from hvdkit.engine.fast_lane import FastLane
from hvdkit.engine.joining import Joining
from hvdkit.engine.negotiation import JOIN, AllJoined, Answer, Coordinator, Failed, Many
from hvdkit.engine.outbox import Item, Outbox
from hvdkit.engine.roll_call import Directory
from hvdkit.engine.stall import Stalls, main_thread_stack
from hvdkit.engine.timeline import Timeline
from hvdkit.engine.vocabulary import Heard, Said
from hvdkit.errors import DuplicateNameError, HorovodInternalError
from hvdkit.transport.base import Buffer, Transport
from hvdkit.transport.waiting import Waiting

_IDLE_S = 0.05  # how often a thread with nothing to do looks at the mail: to answer questions, and for who has left


class NamedEngine:
    """Named operations among the ranks of a transport; opened and closed by all of them together.

    transport: this engine's alone. hosts: of each rank, and ranks: its number in the world, for messages. timeline: of
    this process.
    """

    watched, takes_tensors = True, False

    def __init__(
        self, transport: Transport, config: Config, *, hosts: Sequence[str], ranks: Sequence[int], timeline: Timeline
    ) -> None:
        self.transport = transport
        self._limit_bytes = config.fusion_bytes
        self._hosts, self._ranks, self.timeline = hosts, ranks, timeline
        self._mail = transport.open_mailbox()
        self._coordinator = Coordinator(transport.size, self.who) if transport.rank == 0 else None
        self._stalls = Stalls(config, self.who)
        #: After so many seconds a wait that is no operation is told to the others.
        self.notice_s = min([1.0, *(each / 4 for each in (config.stall_check_s, config.stall_shutdown_s) if each > 0)])
        self._lane = FastLane(self, transport.open_lane())
        self._operations: dict[str, Operation] = {}
        self._directory = Directory()
        self._outbox = Outbox(self._directory)
        self._join: Operation | None = None
        self.joining = Joining()
        self._asked: list[Heard[Announcement]] = [Heard() for _ in range(transport.size)]
        self._telling: Said[tuple[Any, ...]] = Said()
        self._told: Heard[tuple[Any, ...]] = Heard()
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
        return f"{kind}.noname.{self.count(kind)}"

    def count(self, kind: str) -> int:
        """How many of a kind there have been with this one, from 1; the same on every rank where the order is."""
        with self._submitting:
            number = self._counters[kind] = self._counters.get(kind, 0) + 1
        return number

    def submit(self, name: str, asked: Announcement, buffers: Sequence[Buffer]) -> Operation:
        """Begin an operation; it is done some time after every rank has begun it.

        buffers: left alone by the caller until then.
        Raises DuplicateNameError if an operation of this name is still under way here, HorovodInternalError if the
        engine has failed.
        """
        operation = Operation(name, asked, buffers)
        self._register(operation)
        self.announce(operation)
        if not self._awake.is_set():
            self._awake.set()
        return operation

    def do(
        self, name: str, asked: Announcement, buffers: Sequence[Buffer], *, action: Action | None = None
    ) -> Operation:
        """Begin an operation and return when it is done; raises what it failed with, and what submit() raises.

        action: see Operation.
        """
        operation = Operation(name, asked, buffers, action=action)
        self._register(operation)
        if not self._lane.do(operation):
            self.announce(operation)
            self.wait(operation)
        return operation

    def _register(self, operation: Operation) -> None:
        with self._submitting:
            if self._failure is not None:
                raise HorovodInternalError(self._failure)
            if operation.name in self._operations:
                raise DuplicateNameError(
                    f"{operation.name} is still under way on {self.who(self.transport.rank)}. Give operations that run "
                    f"at the same time different names, or synchronize() the first one before."
                )
            self._operations[operation.name] = operation
        self.timeline.begin(operation.name, f"NEGOTIATE_{operation.asked.kind.upper()}")

    def announce(self, operation: Operation, lane: int = 0) -> None:
        """Let rank 0 know of an operation, with the next message. lane: the position after that of the fast lane."""
        self._outbox.add(operation.name, operation.asked, lane)

    def span_of(self, operation: Operation) -> AbstractContextManager[None]:
        """The time in which an operation is done without an answer, for the timeline."""
        self.timeline.end(operation.name)
        return self.timeline.span(operation.asked.kind.upper(), [operation])

    def join(self) -> Operation:
        """Begin to take part in the others' operations, and plans, with zeros until all ranks have joined."""
        operation = Operation(JOIN, Announcement("join", ()), ())
        with self._submitting:
            if self._failure is not None:
                raise HorovodInternalError(self._failure)
            self.joining.begin()
            self._join = operation
            self._outbox.add("", operation.asked)
        self._awake.set()
        return operation

    def withdraw(self, name: str) -> None:
        """Take back an operation without buffers, if it is still under way."""
        with self._submitting:
            if self._operations.pop(name, None) is not None:
                self._outbox.add(name, Announcement("withdraw", ()))
        self.timeline.end(name)

    def take_back(self, operation: Operation) -> None:
        """Take the announcement of an operation back that has been done another way; wait() until that is known."""
        with self._driving:
            self._post()
            operation.withdrawn = True
            self._mail.send(0, pickle.dumps(("withdraw", operation.name)))

    def wait(self, operation: Operation) -> None:
        """Return when the operation is done; raises what it failed with."""
        if not operation.done:
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
            if self._join is not None:
                moved = self._help() or moved
            return moved

    def _post(self) -> bool:
        if not self._outbox:
            return False
        self._mail.send(0, self._outbox.pack(self._lane.met))
        return True

    def _receive(self, rank: int, what: str, content: Any) -> None:
        if what == "announce":
            self._announced(rank, *content)
        elif what == "answer":
            self._answered(content)
        elif what == "withdraw":
            assert self._coordinator is not None
            answers = self._coordinator.take_answers()
            if answers:
                self._tell(answers)  # before the word that no answer will come
            self._coordinator.withdraw(rank, content)
            self._mail.send(rank, pickle.dumps(("withdrawn", content)))
        elif what == "withdrawn":
            self._withdrawn(content)
        elif what == "leave":
            assert self._coordinator is not None
            self._coordinator.leave(rank, content)
        elif what == "stack?":
            self._mail.send(rank, pickle.dumps(("stack", main_thread_stack())))
        elif what == "stack":
            self._stalls.hear(rank, content)
        elif what == "closed":
            self._fail(content)

    def _announced(self, rank: int, met: int, numbers: bytes, items: list[Item]) -> None:
        assert self._coordinator is not None
        self._coordinator.met_before(met)
        now = time.monotonic()
        if numbers:
            self._coordinator.announce_many(rank, np.frombuffer(numbers, np.int32), now)
        for name, number, said, lane in items:
            asked = self._asked[rank].hear(number, said)
            if asked.kind == "join":
                self._coordinator.join(rank)
            elif asked.kind == "withdraw":
                self._coordinator.withdraw(rank, name)
            else:
                self._coordinator.announce(rank, name, asked, now, lane)

    def _ask(self, rank: int) -> None:
        self._mail.send(rank, pickle.dumps(("stack?", None)))

    def _tell(self, answers: Sequence[Answer]) -> None:
        """Let every rank know, this one last, so that nobody waits for what it does."""
        items = [
            (answer.name, *self._telling.say((answer.asked, answer.rows, answer.joined)), answer.lane, answer.number)
            if isinstance(answer, Ready)
            else answer
            for answer in answers
        ]
        message = pickle.dumps(("answer", items), pickle.HIGHEST_PROTOCOL)
        for rank in range(self.transport.size - 1, -1, -1):
            self._mail.send(rank, message)

    def _answered(self, items: list[Any]) -> None:
        work: list[tuple[Ready, Operation]] = []
        for item in items:
            if isinstance(item, Failed):
                self.finish(item.name, HorovodInternalError(item.why))
            elif isinstance(item, AllJoined):
                self._do(work)
                work = []
                self._joined(item.last)
            elif isinstance(item, Many):
                self._lane.heard(0, some_joined=False)
                work += [self._part_of(self._directory[number]) for number in item.numbers.tolist()]
            else:
                name, said, thing, lane, number = item
                ready = Ready(name, *self._told.hear(said, thing))
                if number >= 0:
                    self._directory.add(ready)
                self._lane.heard(lane, some_joined=bool(ready.joined))
                work.append(self._part_of(ready))
        self._do(work)

    def _part_of(self, ready: Ready) -> tuple[Ready, Operation]:
        """An operation that is ready, with this rank's part of it."""
        self.timeline.end(ready.name)
        self.joining.operations += 1
        operation = self._operations.get(ready.name)
        if operation is None or operation.withdrawn:
            operation = self.joining.stand_in(ready)
        return ready, operation

    def _do(self, work: Sequence[tuple[Ready, Operation]]) -> None:
        if not work:
            return
        try:
            execute(self.transport, work, limit_bytes=self._limit_bytes, span=self.timeline.span)
        except Exception as error:
            failure = error if isinstance(error, HorovodInternalError) else HorovodInternalError(str(error))
            self._finish_all(work, failure)
            self._fail(str(failure))
            if failure is error:
                raise
            raise failure from error
        self._finish_all(work, None)

    def _finish_all(self, work: Sequence[tuple[Ready, Operation]], error: Exception | None) -> None:
        with self._submitting:
            for _, operation in work:
                if self._operations.get(operation.name) is operation:
                    del self._operations[operation.name]
                    operation.error = error or operation.error
                    operation.done = True

    def finish(self, name: str, error: Exception | None = None) -> None:
        """The operation has been done, or has failed."""
        with self._submitting:
            if name == JOIN:
                operation, self._join = self._join, None
            else:
                operation = self._operations.get(name)
                if operation is not None and operation.withdrawn:
                    return
                self._operations.pop(name, None)
            if operation is not None:
                operation.error = error or operation.error
                operation.done = True

    def _withdrawn(self, name: str) -> None:
        self.timeline.end(name)
        with self._submitting:
            operation = self._operations.pop(name, None)
        if operation is not None:
            operation.done = True

    def _joined(self, last: int) -> None:
        self._lane.all_joined()
        if self._join is not None:
            self._join.last_joined = self.joining.settle(self.transport, last)

    def _help(self) -> bool:
        """Take part in the rounds of those who train; the join is done when nobody does."""
        moved = self.joining.advance()
        if self.joining.over:
            self.finish(JOIN)
        return moved

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
                self._outbox.let_gather()
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
        self._failure = "hvdkit has been shut down (or the process set removed). Call hvd.init() first."
        self._awake.set()
        if self._thread is not None:
            self._thread.join()
        self._mail.close()
        self._lane.close()
        self.transport.close()
