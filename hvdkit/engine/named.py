"""The ad hoc path: operations under a name, submitted from any thread in any order, done when all ranks have them.

Rank 0 of the group is told what every rank has, and tells all of them what is ready (negotiation.py). Whoever waits for
a result drives that; a thread does where nobody waits. So a rank that computes still takes part, and a rank that waits
does so without a detour through a thread.

Small operations that every rank waits for at once need none of that where the ranks have a lane in common: each shows
its part, and whoever sees all parts has the result. A rank that does not see them soon announces the operation as well.
Should all parts turn up after that, it takes the announcement back, and waits to hear that it has been: nobody else has
done it through announcements then, since a rank announces nothing before it has looked for the others' parts: the last
one to show its part has seen them all. The others may be at the next operation meanwhile, even under the same name, so
what a rank announces says where it has last met all the others.
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
from hvdkit.engine.shortcut import Shortcut, plan_shortcut, show, take
from hvdkit.engine.stall import Stalls, main_thread_stack
from hvdkit.engine.timeline import Timeline
from hvdkit.errors import DuplicateNameError, HorovodInternalError
from hvdkit.transport.base import Buffer, Transport
from hvdkit.transport.lane import EQUAL, MISSING, Lane
from hvdkit.transport.waiting import Waiting

_CACHE = 1024  # different operations that are known by number
_IDLE_S = 0.05  # how often a thread with nothing to do looks at the mail: to answer questions, and for who has left
_PATIENCE_S = 0.002  # how long the others' parts are looked for before an operation is announced
_LOOKS = 100  # about 50 us: the first of these do without giving the core away
_BUSY_S = 0.0005  # the same while operations are under way and nobody waits for them


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
        self._lane = transport.open_lane()
        self._lane_free = threading.Lock()  # held by the thread that is at a position of it
        self._some_joined = False  # they show nothing
        self._lane_from = 0  # positions before are lost: some rank has moved on
        self._met = 0  # the position after the last one at which all have met
        self._shortcuts: dict[Announcement, Shortcut | None] = {}
        self._operations: dict[str, Operation] = {}
        self._outbox: list[tuple[str, Announcement, int]] = []
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

    def submit(self, name: str, asked: Announcement, buffers: Sequence[Buffer]) -> Operation:
        """Begin an operation; it is done some time after every rank has begun it.

        buffers: left alone by the caller until then.
        Raises DuplicateNameError if an operation of this name is still under way here, HorovodInternalError if the
        engine has failed.
        """
        operation = Operation(name, asked, buffers)
        self._register(operation)
        self._announce(operation)
        self._awake.set()
        return operation

    def do(self, name: str, asked: Announcement, buffers: Sequence[Buffer]) -> Operation:
        """Begin an operation and return when it is done; raises what it failed with, and what submit() raises."""
        operation = Operation(name, asked, buffers)
        self._register(operation)
        shortcut = self._shortcut(asked)
        if shortcut is not None and self._lane_free.acquire(blocking=False):
            try:
                self._do_on_lane(operation, shortcut)
            finally:
                self._lane_free.release()
        else:
            self._announce(operation)
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
        self._timeline.begin(operation.name, f"NEGOTIATE_{operation.asked.kind.upper()}")

    def _announce(self, operation: Operation, lane: int = 0) -> None:
        with self._submitting:
            self._outbox.append((operation.name, operation.asked, lane))

    def _shortcut(self, asked: Announcement) -> Shortcut | None:
        if self._lane is None or self._some_joined:
            return None
        try:
            return self._shortcuts[asked]
        except KeyError:
            shortcut = plan_shortcut(asked, self._lane.limit, self.transport.size)
            if len(self._shortcuts) < _CACHE:
                self._shortcuts[asked] = shortcut
            return shortcut

    def _do_on_lane(self, operation: Operation, shortcut: Shortcut) -> None:
        lane = self._lane
        assert lane is not None
        lane.skip_to(self._lane_from)
        if not show(lane, self.transport.rank, operation, shortcut):
            self._announce(operation)
            self.wait(operation)
            return
        try:
            if self._see(lane):
                self._timeline.end(operation.name)
                self._met = lane.position + 1
                with self._timeline.span(operation.asked.kind.upper(), [operation]):
                    take(lane, operation, shortcut, self.transport.arithmetic)
                self._finish(operation.name, None)
                return
            self._announce(operation, lane.position + 1)
            try:
                if not self._wait_beside_lane(operation, lane):
                    return
            except HorovodInternalError:
                if lane.look() != EQUAL:  # else who has left has shown its part before
                    raise
            take(lane, operation, shortcut, self.transport.arithmetic)
        finally:
            lane.leave()

    def _wait_beside_lane(self, operation: Operation, lane: Lane) -> bool:
        """Wait until the operation is done, then False; or all parts are there and it is not going to be, then True."""
        waiting = Waiting(self.transport.check)
        while not operation.done:
            if lane.look() == EQUAL:
                with self._driving:
                    self._post()
                    self._met = lane.position + 1
                    operation.withdrawn = True
                    self._mail.send(0, pickle.dumps(("withdraw", operation.name)))
                self.wait(operation)
                return True
            if not self.drive():
                waiting.pause()
        if operation.error is not None:
            raise operation.error
        return False

    def _see(self, lane: Lane) -> bool:
        """Do all ranks show their part within the time that is worth it?"""
        until, looks = time.perf_counter() + _PATIENCE_S, 0
        while (seen := lane.look()) == MISSING and self._lane_from <= lane.position:
            looks += 1
            if looks < _LOOKS:
                continue
            if time.perf_counter() > until:
                return lane.look() == EQUAL
            os.sched_yield()
        return seen == EQUAL

    def join(self) -> Operation:
        """Begin to take part in the others' operations with zeros, until all ranks have joined."""
        operation = Operation("join", Announcement("join", ()), ())
        with self._submitting:
            if self._failure is not None:
                raise HorovodInternalError(self._failure)
            self._join = operation
            self._outbox.append(("", operation.asked, 0))
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
        items: list[tuple[str, int, Announcement | None, int]] = []
        for name, asked, lane in outbox:
            number = self._sent.get(asked, -1)
            if number >= 0:
                items.append((name, number, None, lane))
                continue
            if len(self._sent) < _CACHE:
                number = self._sent[asked] = len(self._sent)
            items.append((name, number, asked, lane))
        self._mail.send(0, pickle.dumps(("announce", (self._met, items)), pickle.HIGHEST_PROTOCOL))
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

    def _announced(self, rank: int, met: int, items: list[tuple[str, int, Announcement | None, int]]) -> None:
        assert self._coordinator is not None
        self._coordinator.met_before(met)
        now, known = time.monotonic(), self._asked[rank]
        for name, number, asked, lane in items:
            if asked is None:
                asked = known[number]
            elif number >= 0:
                known.append(asked)
            if asked.kind == "join":
                self._coordinator.join(rank)
            else:
                self._coordinator.announce(rank, name, asked, now, lane)

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
                items.append((answer.name, number, None, answer.lane))
                continue
            if len(self._told) < _CACHE:
                number = self._told[body] = len(self._told)
            items.append((answer.name, number, body, answer.lane))
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
                name, number, body, lane = item
                if body is None:
                    body = self._heard[number]
                elif number >= 0:
                    self._heard.append(body)
                ready = Ready(name, *body)
                self._lane_from = max(self._lane_from, lane)
                self._some_joined = bool(ready.joined)
                self._timeline.end(name)
                operation = self._operations.get(name)
                work.append((ready, absent(ready) if operation is None or operation.withdrawn else operation))
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
            raise
        for ready, _ in work:
            self._finish(ready.name, None)

    def _finish(self, name: str, error: Exception | None) -> None:
        with self._submitting:
            operation = self._operations.get(name)
            if operation is None or operation.withdrawn:
                return
            del self._operations[name]
            operation.error = error
            operation.done = True

    def _withdrawn(self, name: str) -> None:
        self._timeline.end(name)
        with self._submitting:
            operation = self._operations.pop(name, None)
        if operation is not None:
            operation.done = True

    def _joined(self, last: int) -> None:
        self._some_joined = False
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
            busy = bool(self._operations or self._outbox or self._join)
            if busy:
                time.sleep(_BUSY_S)
            else:
                self._awake.wait(_IDLE_S)
            self._awake.clear()
            if self._driving.acquire(blocking=False):
                try:
                    while not self._closing and self.drive():
                        pass
                except HorovodInternalError:
                    return  # every operation has been told
                finally:
                    self._driving.release()

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
        if self._lane is not None:
            self._lane.close()
        self.transport.close()
