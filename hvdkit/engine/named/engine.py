"""The ad hoc path: operations under a name, submitted from any thread in any order, done when all ranks have them.

Rank 0 of the group learns what every rank has, and lets all of them know what is ready (negotiator.py). Whoever waits
for a result drives that; a thread does where nobody waits. So a rank that computes still takes part, and a rank that
waits does so without a detour through a thread.

Small operations that every rank waits for at once need none of that on a fast lane (fast_lane.py).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from hvdkit.config import Config
from hvdkit.engine.named.announcement import Announcement, Ready
from hvdkit.engine.named.collecting import JOINING, WITHDRAWING
from hvdkit.engine.named.coordinator import JOIN, AllJoined, Answer, Failed, Many
from hvdkit.engine.named.execution import Action, Operation, plan_steps
from hvdkit.engine.named.fast_lane import FastLane
from hvdkit.engine.named.joining import Joining
from hvdkit.engine.named.negotiator import Negotiator
from hvdkit.engine.named.step_runner import StepRunner
from hvdkit.engine.named.tree import FANOUT
from hvdkit.engine.observe.stall import Stalls
from hvdkit.engine.observe.stragglers import Stragglers
from hvdkit.engine.observe.timeline import Timeline
from hvdkit.errors import DuplicateNameError, HorovodInternalError, RanksDisagreeError, TransportError
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import Buffer
from hvdkit.transport.polling import Backoff

_TURN_S = 0.05  # how long a thread waits for one that is in a step, before it looks at the mail
_IDLE_S = 0.05  # how often a thread with nothing to do looks at the mail: to answer questions, and for who has left


class NamedEngine:
    """Named operations among the ranks of a transport; opened and closed by all of them together.

    transport: this engine's alone. hosts: of each rank, and ranks: its number in the world, for messages. timeline: of
    this process. job_ranks: see World.
    """

    takes_tensors = False

    def __init__(
        self,
        transport: Transport,
        config: Config,
        *,
        hosts: Sequence[str],
        ranks: Sequence[int],
        timeline: Timeline,
        job_ranks: Sequence[int] | None = None,
    ) -> None:
        self.transport = transport
        self._limit_bytes = config.fusion_bytes
        self._hosts, self.ranks, self._job_ranks, self.timeline = hosts, ranks, job_ranks, timeline
        #: After so many seconds a wait that is no operation, and a step of one, is told to the others.
        self.notice_s = min([1.0, *(each / 4 for each in (config.stall_check_s, config.stall_shutdown_s) if each > 0)])
        mail, lane = transport.open_mailbox(), transport.open_lane()
        self._talks = Negotiator(
            mail,
            transport.rank,
            transport.size,
            who=self.who,
            listener=self,
            stalls=Stalls(config, self.who),
            stragglers=Stragglers(transport.size, self.who, config.straggler_percent),
            fanout=FANOUT if lane is None else transport.size,  # a lane's positions are compared in one place
            hear_of_steps=lambda *message: self._steps.hear(*message),
        )
        self._lane = FastLane(self, lane)
        self._operations: dict[str, Operation] = {}
        self._outbox = self._talks.outbox
        self.report_window = self._outbox.add_window
        self._join: Operation | None = None
        self.joining = Joining()
        self._failure: str | None = None
        self._submitting = threading.Lock()
        # The lock for steps is taken before the one for messages, if both are. That one is never held for long, so
        # that messages are answered while a step is under way.
        self._executing = threading.RLock()
        self._talking = threading.RLock()
        self._heard: deque[Callable[[], None]] = deque()  # what is to be done about messages, in their order
        self._steps = StepRunner(
            transport,
            config,
            send=self._talks.send_of_steps,
            talk=self._talk,
            talking=self._talking,
            failed=self._fail,
            who=self.who,
            notice_s=self.notice_s,
        )
        self._awake = threading.Event()
        self._closing = False
        self._counters: dict[str, int] = {}
        self._start_thread()

    def who(self, rank: int) -> str:
        """Name a rank of this engine for a message."""
        job = f"job rank {self._job_ranks[rank]}, " if self._job_ranks else ""
        return f"rank {self.ranks[rank]} ({job}host {self._hosts[rank]})"

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
        try:
            shown = self._lane.do(operation)
        except HorovodInternalError:
            raise
        except Exception as error:
            if operation.done:  # all ranks have shown their part, so nobody waits for this one
                raise
            raise self._steps.stop_all(name, error) from error
        if not shown:
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
        """Announce an operation with the next message. lane: the position after that of the fast lane."""
        self._outbox.add(operation.name, operation.asked, lane)

    def span_of(self, operation: Operation) -> AbstractContextManager[None]:
        """The time in which an operation is done without an answer, for the timeline."""
        self.timeline.end(operation.name)
        return self.timeline.span(operation.asked.kind.upper(), [operation])

    def join(self) -> Operation:
        """Begin to take part in the others' operations, and plans, with zeros until all ranks have joined."""
        operation = Operation(JOIN, JOINING, ())
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
                self._outbox.add(name, WITHDRAWING)
        self.timeline.end(name)

    def take_back(self, operation: Operation) -> None:
        """Take the announcement of an operation back that has been done another way; wait() until that is known."""
        with self._executing, self._talking:
            operation.withdrawn = True
            self._talks.take_back(operation.name, self._lane.met)

    def wait(self, operation: Operation) -> None:
        """Return when the operation is done; raises what it failed with."""
        if not operation.done:
            waiting = Backoff(self.transport.check)
            while not operation.done:
                if not self.drive():
                    waiting.pause()
        if operation.error is not None:
            raise operation.error

    def drive(self) -> bool:
        """Send, receive and do what can be done now; True if anything moved."""
        moved = self._talk()
        if not self._executing.acquire(timeout=_TURN_S):  # another thread is in a step; messages go on meanwhile
            return moved
        try:
            while self._heard:
                moved = True
                self._heard.popleft()()
            if self._join is not None:
                moved = self._help() or moved
        finally:
            self._executing.release()
        return moved

    def _talk(self) -> bool:
        """Send and receive; True if anything moved. What comes of it is left to whoever has the lock for steps."""
        with self._talking:
            moved = self._talks.turn(self._lane.met)
            self._steps.turn()
            return moved

    def answered(self, answers: Sequence[Answer]) -> None:
        """See Listener.answered."""
        self._heard.append(lambda: self._answer(answers))

    def _answer(self, answers: Sequence[Answer]) -> None:
        work: list[tuple[Ready, Operation]] = []
        for answer in answers:
            if isinstance(answer, Failed):
                kind = RanksDisagreeError if answer.disagree else HorovodInternalError
                self.finish(answer.name, kind(answer.why))
            elif isinstance(answer, AllJoined):
                self._do(work)
                work = []
                self._joined(answer.last)
            elif isinstance(answer, Many):
                self._lane.heard(0, some_joined=False)
                work += [self._part_of(self._talks.directory[number]) for number in answer.numbers.tolist()]
            else:
                self._lane.heard(answer.lane, some_joined=bool(answer.joined))
                work.append(self._part_of(answer))
        self._do(work)

    def _part_of(self, ready: Ready) -> tuple[Ready, Operation]:
        """An operation that is ready, with this rank's part of it."""
        self.timeline.end(ready.name)
        self.joining.operations += 1
        operation = self._operations.get(ready.name)
        if operation is None or operation.withdrawn:
            try:
                operation = self.joining.contribution(ready)
            except Exception as error:
                raise self._steps.stop_all(ready.name, error) from error
        return ready, operation

    def _do(self, work: Sequence[tuple[Ready, Operation]]) -> None:
        for step in plan_steps(self.transport, work, limit_bytes=self._limit_bytes, span=self.timeline.span):
            error = self._steps.do(step.label, step.do)
            for operation in step.operations:
                operation.error = operation.error or error
        self._finish_all(work)

    def _finish_all(self, work: Sequence[tuple[Ready, Operation]]) -> None:
        with self._submitting:
            for _, operation in work:
                if self._operations.get(operation.name) is operation:
                    del self._operations[operation.name]
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

    def withdrawn(self, name: str) -> None:
        """See Listener.withdrawn."""
        self._heard.append(lambda: self._take_out(name))

    def _take_out(self, name: str) -> None:
        self.timeline.end(name)
        with self._submitting:
            operation = self._operations.pop(name, None)
        if operation is not None:
            operation.done = True

    def _joined(self, last: int) -> None:
        self._lane.all_joined()
        join = self._join
        if join is not None:

            def settle() -> None:
                join.last_joined = self.joining.settle(self.transport, last)

            error = self._steps.do("join", settle)
            if error is not None:
                self.finish(JOIN, error)

    def _help(self) -> bool:
        """Take part in the rounds of those who train; the join is done when nobody does."""
        moved = self.joining.advance()
        if self.joining.over:
            self.finish(JOIN)
        return moved

    def failed(self, why: str) -> None:
        """See Listener.failed. What was ready before is done."""
        self._steps.closed()
        self._heard.append(lambda: self._fail(why))

    def _fail(self, why: str, error: HorovodInternalError | None = None) -> None:
        """Nothing can be done any more: tell all who wait, and who will come."""
        with self._submitting:
            self._failure = why
            waiting, self._operations = list(self._operations.values()), {}
            if self._join is not None:
                waiting.append(self._join)
                self._join = None
        for operation in waiting:
            operation.error = error or HorovodInternalError(why)
            operation.done = True

    def _run(self) -> None:
        while not self._closing:
            self._awake.wait(_IDLE_S)
            self._awake.clear()
            if self._busy:
                self._outbox.let_gather()
            try:
                if self._executing.acquire(blocking=False):
                    try:
                        while not self._closing and self.drive():
                            pass
                    finally:
                        self._executing.release()
                else:
                    self._talk()
            except TransportError:
                return  # every operation has been told, and there is no way to tell more
            except HorovodInternalError:
                pass  # the same; other ranks may be told still
            if self._busy:
                self._awake.set()

    @property
    def _busy(self) -> bool:
        return bool(self._operations or self._outbox or self._join)

    @property
    def stopped(self) -> bool:
        """See Engine."""
        return self._steps.stopped

    def leave(self, why: str) -> None:
        """Tell the others that this rank takes no further part; not collective. why: follows its name."""
        self._closing = True
        if self.transport.size > 1 and os.getpid() == self._process:
            with self._talking:
                self._steps.leave()
                self._talks.leave(f"{self.who(self.transport.rank)} {why}")

    def close(self, *, idle: bool = True) -> None:
        """See Engine.close."""
        self._closing = True
        idle = idle and not self.stopped
        self._failure = "hvdkit has been shut down (or the process set removed). Call hvd.init() first."
        self._awake.set()
        if self._thread is not None:
            self._thread.join()
        self._talks.close(idle=idle)
        self._lane.close()
        self.transport.close(idle=idle)
