"""The engine of named operations: submitted from any thread in any order, done when all ranks have submitted them.

The path of an operation: the rank announces it to rank 0 of the group by name, later by a number (negotiator.py); rank
0 answers all ranks when it is ready everywhere (coordinator.py); each rank then executes the ready operations in the
order of the answers, over the group's transport (execution.py). A thread that waits for a result drives this itself;
without such a thread, the engine's thread drives it. So a rank that computes still takes part, and a rank that waits
does so without a switch to another thread.

Locks, in the order in which they are taken; no other order is allowed:
1. `_executing`, by the thread that executes ready operations: held through whole collectives, and so for as long as
   other ranks take. A thread waits for it for a limited time, and handles messages meanwhile.
2. `_talking`, by the thread that sends and receives: never held while waiting for another rank.
3. `_registering`, around the table of operations: never held across a blocking call.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Sequence

from hvdkit.config import Config
from hvdkit.engine.named.api import SHUT_DOWN, UNNAMED, Engine
from hvdkit.engine.named.execution import Executor, Work, join_contribution
from hvdkit.engine.named.joining import WITH_ACTION, Joining
from hvdkit.engine.named.negotiator import Negotiator
from hvdkit.engine.named.operation import (
    JOIN,
    JOINING,
    WITHDRAWING,
    Action,
    AllJoined,
    Answer,
    Failed,
    Operation,
    OperationRequest,
    Ready,
)
from hvdkit.engine.named.step_runner import StepRunner
from hvdkit.engine.named.tree import FANOUT
from hvdkit.engine.observe.stall import Stalls
from hvdkit.engine.observe.stragglers import Stragglers
from hvdkit.engine.observe.timeline import Timeline
from hvdkit.errors import HorovodInternalError, RanksDisagreeError, TransportError
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import Buffer
from hvdkit.transport.polling import Backoff, check_refused

_TURN_S = 0.05  # how long a thread waits for another that executes, before it checks the mailbox
_IDLE_S = 0.05  # interval at which an idle thread checks the mailbox, for queries and for ranks that have left
_LOOK_S = 0.05  # interval of the checks for operations and steps that take too long
_PAUSE_S = 0.001  # a pause for more announcements, which come in bursts
_MOST_PAUSES = 10


class NamedEngine(Engine):
    """The Engine of the ranks of a transport; opened and closed by all of them together.

    transport: used by this engine only.
    config: the settings of this process.
    hosts, ranks: see Engine.
    timeline: of this process.
    job_ranks: see Engine.
    """

    takes_tensors = False
    most_names = 240  # has many divisors, so that calls repeated in a loop reuse their names, which then have numbers

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
        super().__init__(hosts, ranks, job_ranks)
        self.transport, self.timeline = transport, timeline
        #: Seconds after which a wait outside of operations, or the execution of an operation, is reported to rank 0.
        limits_s = (config.stall_check_s, config.stall_shutdown_s)
        self.notice_s = notice_s = min([1.0, *(limit_s / 4 for limit_s in limits_s if limit_s > 0)])
        self._negotiator = Negotiator(
            transport.open_mailbox(),
            transport.rank,
            transport.size,
            who=self.who,
            stalls=Stalls(config, self.who),
            stragglers=Stragglers(transport.size, self.who, config.straggler_percent),
            fanout=FANOUT,
            hear_of_steps=lambda *message: self._steps.on_message(*message),
        )
        self.report_window = self._negotiator.windows.append
        self._executor = Executor(transport, config.fusion_bytes, timeline)
        self._operations: dict[str, Operation] = {}
        self._queued: dict[str, deque[Operation]] = {}  # operations that wait for another of the same name to end
        self._missed: dict[str, deque[Exception]] = {}  # name -> errors of operations that have not begun here
        self._join: Operation | None = None
        self._join_waits = False  # join() is announced only after the queued operations
        self.joining = Joining()
        self._failure: str | None = None
        self._executing, self._talking = threading.RLock(), threading.RLock()
        self._registering = threading.Lock()
        self._steps = StepRunner(
            transport,
            config,
            send=self._negotiator.send,
            talk=self._talk,
            talking=self._talking,
            closed=lambda: self._negotiator.closed,
            failed=self._fail,
            who=self.who,
            notice_s=notice_s,
        )
        self._awake = threading.Event()
        self._closing, self._next_look_s, self._process = False, 0.0, os.getpid()
        self.thread: threading.Thread | None = None
        if transport.size > 1:
            self.thread = threading.Thread(target=self._run, name="hvdkit-named", daemon=True)
            self.thread.start()

    def submit(self, name: str, request: OperationRequest, buffers: Sequence[Buffer]) -> Operation:
        operation = self._announce(Operation(name, request, buffers))
        if not self._awake.is_set():
            self._awake.set()
        return operation

    def do(
        self, name: str, request: OperationRequest, buffers: Sequence[Buffer], *, action: Action | None = None
    ) -> Operation:
        operation = self._announce(Operation(name, request, buffers, action))
        self.wait(operation)
        return operation

    def _announce(self, operation: Operation) -> Operation:
        check_refused()
        with self._registering:
            if self._failure is not None:
                raise HorovodInternalError(self._failure)
            missed = self._missed.get(operation.name)
            if missed:  # this operation has failed already, and must not be matched with the next one of its name
                operation.error, operation.done = missed.popleft(), True
                return operation
            if self._operations.setdefault(operation.name, operation) is not operation:
                if UNNAMED in operation.name:
                    self._queued.setdefault(operation.name, deque()).append(operation)
                    return operation
                raise self.duplicate(operation.name)
        self._negotiate(operation)
        return operation

    def _negotiate(self, operation: Operation) -> None:
        if self.timeline.on:
            self.timeline.begin(operation.name, f"NEGOTIATE_{operation.request.kind.upper()}")
        self._negotiator.add(operation.name, operation.request)

    def _free(self, name: str) -> None:
        """Free the name of an operation that has ended, and begin the next that waits for it; holds `_registering`."""
        queue = self._queued.get(name)
        if queue:
            operation = self._operations[name] = queue.popleft()
            self._negotiate(operation)
            if self._join_waits and not any(self._queued.values()):
                self._join_waits = False
                self._negotiator.add("", JOINING)
        else:
            self._operations.pop(name, None)

    def join(self) -> Operation:
        operation = Operation(JOIN, JOINING, ())
        check_refused()
        with self._registering:
            if self._failure is not None:
                raise HorovodInternalError(self._failure)
            self.joining.begin()
            self._join, self._join_waits = operation, any(self._queued.values())
            if not self._join_waits:
                self._negotiator.add("", JOINING)
        self._awake.set()
        return operation

    def withdraw(self, name: str) -> None:
        with self._registering:
            known = self._operations.pop(name, None)
        if known is not None:
            self._negotiator.add(name, WITHDRAWING)
        self.timeline.end(name)

    def wait(self, operation: Operation) -> None:
        check_refused()
        if not operation.done:
            backoff = Backoff(self.transport.check)
            while not operation.done:
                if not self.drive():
                    backoff.pause()
        if operation.error is not None:
            raise operation.error

    def drive(self) -> bool:
        moved = self._talk()
        heard = self._negotiator.heard
        if not heard and self._join is None:
            return moved
        if not self._executing.acquire(timeout=_TURN_S):  # another thread executes; messages go on meanwhile
            return moved
        try:
            while heard:
                moved = True
                self._execute(heard.popleft())
            if self._join is not None:
                moved = self._help() or moved
        finally:
            self._executing.release()
        return moved

    def _talk(self) -> bool:
        """Send and receive messages; True if there was any. The thread that holds `_executing` handles the answers."""
        with self._talking:
            moved = self._negotiator.turn()
            now = time.monotonic()
            if now >= self._next_look_s:
                self._next_look_s = now + _LOOK_S
                self._negotiator.check()
                self._steps.check()
        return moved

    def _execute(self, answers: Sequence[Answer]) -> None:
        """Act on rank 0's answers; the caller holds `_executing`."""
        ready: list[Ready] = []
        for answer in answers:
            if isinstance(answer, int):
                ready.append(self._negotiator.numbers.ready[answer])
            elif isinstance(answer, Ready):
                ready.append(answer)
            elif isinstance(answer, Failed):
                kind = RanksDisagreeError if answer.disagree else HorovodInternalError
                self._finish(answer.name, kind(answer.why))
            else:
                self._do(ready)
                ready = []
                if isinstance(answer, AllJoined):
                    self._all_joined(answer.last)
                else:
                    self._end_joining()
                    self._fail(answer.why)
        if ready:
            self._do(ready)

    def _do(self, ready: Sequence[Ready]) -> None:
        """Execute operations that became ready together."""
        known = self._operations
        self.joining.operations += len(ready)
        operations = [known.get(each.name) or self._contribution(each) for each in ready]
        if self.timeline.on:
            for operation in operations:
                self.timeline.end(operation.name)
        for work in self._executor.plan(ready, operations):
            error = self._steps.do(work)
            if error is not None:
                for operation in work.operations:
                    operation.error = operation.error or error
        with self._registering:
            for operation in operations:
                if known.get(operation.name) is operation:
                    operation.done = True
                    self._free(operation.name)

    def _contribution(self, ready: Ready) -> Operation:
        """Make a joined rank's contribution to an operation that it has not submitted."""
        if ready.request.kind not in WITH_ACTION:
            return join_contribution(ready)
        try:
            return Operation(ready.name, ready.request, (), self.joining.action_for(ready.name))
        except Exception as error:
            raise self._steps.stop_all(ready.name, error) from error

    def _finish(self, name: str, error: Exception | None = None) -> None:
        """Complete an operation that has failed, or the join."""
        with self._registering:
            if name == JOIN:
                operation, self._join = self._join, None
            else:
                operation = self._operations.get(name)
                if operation is None and error is not None and UNNAMED in name:
                    self._missed.setdefault(name, deque()).append(error)
                self._free(name)
        if operation is not None:
            operation.error = error or operation.error
            operation.done = True

    def _all_joined(self, last: int) -> None:
        join = self._join
        if join is not None:
            self.count_anew()  # the counts differ, because ranks with more work have begun more operations
            self._missed.clear()

            def find_last_joined() -> None:
                join.last_joined = self.joining.find_last_joined(self.transport, last)

            error = self._steps.do(Work([join], find_last_joined))
            if error is not None:
                self._finish(JOIN, error)

    def _help(self) -> bool:
        """Take part in the rounds of the ranks that train; the join is done when no rank trains."""
        moved = self.joining.advance()
        if self.joining.over:
            self._finish(JOIN)
        return moved

    def _end_joining(self) -> None:
        """End the zero rounds after a rank has left. If all had joined before, that rank has ended its own already."""
        backoff = Backoff(self.transport.check)
        while self._join is not None and self.joining.all_have_joined:
            if not self._help():
                backoff.pause()

    def _fail(self, why: str, error: HorovodInternalError | None = None) -> None:
        """Fail all pending and future operations."""
        with self._registering:
            self._failure = why
            waiting = [*self._operations.values(), *itertools.chain(*self._queued.values())]
            self._operations.clear()
            self._queued.clear()
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
                self._let_gather()
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
                return  # every operation has its error, and no message can be sent any more
            except HorovodInternalError:
                pass  # every operation has its error; messages to other ranks may still be sent
            if self._busy:
                self._awake.set()

    def _let_gather(self) -> None:
        """Pause briefly, and longer while more announcements arrive, which come in bursts."""
        more = -1
        for _ in range(_MOST_PAUSES):
            time.sleep(_PAUSE_S)
            before, more = more, self._negotiator.has_more
            if more in (0, before):
                return

    @property
    def _busy(self) -> bool:
        return bool(self._operations or self._negotiator.has_more or self._join)

    @property
    def stopped(self) -> bool:
        return self._steps.stopped

    def leave(self, why: str) -> None:
        self._closing = True
        if self.thread is not None and os.getpid() == self._process:
            with self._talking:
                self._steps.leave()
                self._negotiator.leave(f"{self.who(self.transport.rank)} {why}")
            self._awake.set()

    def close(self, *, idle: bool = True) -> None:
        self._closing, idle = True, idle and not self.stopped
        self._awake.set()
        if self.thread is not None:
            self.thread.join()
        self._fail(SHUT_DOWN)
        self._negotiator.close(idle=idle)
        self.transport.close(idle=idle)
