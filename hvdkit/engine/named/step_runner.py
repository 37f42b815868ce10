"""Executes work so that an error on one rank, or a hang, becomes known to all ranks.

All ranks do the same work in the same order, so a unit of work, here a step, has the same number everywhere. A rank on
which a step fails reports that to rank 0, with the number of collectives that it has begun in the step. If the step
fails on all ranks after the same collectives, they are still in step: each raises its error, and goes on. Otherwise
some rank waits for the failed rank, or has gone on without it. The rank that finds this reports it, and rank 0 stops
all ranks (failure_detector.py).

That costs a named allreduce 2 to 3 us on 2 ranks of a host, x1.04 to x1.06 of 4 B to 64 KiB, and x1.02 to x1.04 on 3
ranks (`hvdrun -np 2 python -m benchmarks.step_runner`; two cores). Without it, the other ranks would wait for a rank
that has raised an error until its process ends (tests/ranks/test_step_errors.py has what they get with it).

The engine's lock for messages protects the fields that messages read or change. That lock is taken after the lock for
execution, under which all of do() runs.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from hvdkit.config import Config
from hvdkit.engine.named.execution import Work
from hvdkit.engine.named.failure_detector import FailureDetector, StepProgress
from hvdkit.errors import (
    HorovodInternalError,
    HvdkitError,
    LocalFailureError,
    PlanMismatchError,
    RankLostError,
    SharedMemoryError,
    TransportError,
)
from hvdkit.transport.api import Transport
from hvdkit.transport.polling import Backoff, Calls, calls, watch_waits

_UP, _DOWN = "step", "steps"  # kinds of messages: to rank 0, and from it
_FRAMES = 8
_LOOKED_S = 0.5  # a wait calls _wait_goes_on() every 0.1 s, see polling.py
_LONGEST_TEXT = 1500  # so that MPI sends it at once

#: Special counts of collectives in a failure: the ranks are out of step; they are in step regardless of their counts.
_OUT_OF_STEP, _IN_STEP = -1, 2**62


class StepRunner:
    """Executes the steps of an engine on one rank.

    transport: the engine's.
    config: the stall settings.
    send: sends a message: rank, kind, content.
    talk: sends and receives messages; returns True if there was any.
    talking: the lock for messages.
    closed: Has rank 0 left, or a rank between it and this rank in the tree?
    failed: called when no operation can be done any more, with the reason, and the error if it is this rank's.
    who: names a rank.
    notice_s: seconds after which a running step is reported.
    """

    def __init__(
        self,
        transport: Transport,
        config: Config,
        *,
        send: Callable[[int, str, Any], None],
        talk: Callable[[], bool],
        talking: threading.RLock,
        closed: Callable[[], bool],
        failed: Callable[[str, HorovodInternalError | None], None],
        who: Callable[[int], str],
        notice_s: float,
    ) -> None:
        self._transport, self._send, self._talk, self._talking = transport, send, talk, talking
        self._closed, self._failed, self._name, self._notice_s = closed, failed, who(transport.rank), notice_s
        self._books: FailureDetector | None = None
        if transport.rank == 0:
            self._books = FailureDetector(transport.size, config, lambda rank, text: self._tell(rank, _DOWN, text), who)
        self._reason: str | None = None  # why no step can begin any more, and a running step is aborted
        self._stopped = self._apart = False
        self._number = self._ended = 0  # numbers of the last step that began, and of the last that ended
        self._work: Work | None = None
        self._thread, self._began_s, self._looked_s = 0, 0.0, 0.0
        self._calls, self._before = Calls(), 0
        self._reported = self._failed_step = 0
        self._failing: tuple[int, int, str] | None = None  # failure on another rank: step, collectives begun, reason
        self._alike: tuple[int, bool] | None = None

    @property
    def stopped(self) -> bool:
        """Are all ranks stopped, or will they be? Then some ranks have not begun, or not completed, a collective."""
        return self._stopped or self._apart or (self._books is not None and self._books.stopped)

    def do(self, work: Work) -> Exception | None:
        """Execute a step. Returns None, or the error of its operations if it failed but the ranks are still in step.

        The returned error is this rank's own if the step failed with the same kind of error on all ranks. If other
        ranks have another kind of error, or have left, it is a HorovodInternalError caused by this rank's error, or a
        LocalFailureError if this rank's error is not one of hvdkit's.
        Raises these two, with the text of the first error, if ranks are out of step or the engine has been stopped.
        """
        if self._reason is not None:
            raise HorovodInternalError(self._reason)
        self._work, self._thread, self._calls = work, threading.get_ident(), calls()
        self._calls.uncertain, self._before = False, self._calls.begun
        self._began_s = time.monotonic()
        self._number += 1
        outer = watch_waits(self._wait_goes_on)
        try:
            work.do()
        except Exception as error:
            return self._agree_on(error)
        finally:
            watch_waits(outer)
            self._ended, self._work = self._number, None  # the work's owner, such as an optimizer, may be freed
            if (
                self._reported == self._number or self._failing is not None
            ):  # a later message is handled by on_message()
                self._tell_of_end()
        return None

    def _tell_of_end(self) -> None:
        with self._talking:
            if self._reported == self._number:
                self._tell_first(("ended", self._number))
            if self._failing is not None:
                self._compare(self._failing)

    def _wait_goes_on(self) -> None:
        """Handle messages while a step waits for other ranks, and end the wait if it cannot succeed."""
        self._looked_s = time.monotonic()
        self._talk()
        if self._reason is not None:
            raise HorovodInternalError(self._reason)

    def _agree_on(self, error: Exception) -> Exception:
        if self._reason is not None:
            raise _failure_by(error)(self._reason) from error
        if not isinstance(error, RankLostError):  # the other ranks notice a lost rank by themselves
            with self._talking:
                certain = self._tell_of(error)
            if certain or not isinstance(error, TransportError):
                return self._hear_of(error)
            self._stopped = True
            self._talk()
        failure = error if isinstance(error, HorovodInternalError) else HorovodInternalError(describe(error))
        self._end(str(failure), failure)
        raise failure

    def _tell_of(self, error: Exception) -> bool:
        """Report to rank 0 that the step has failed here. Returns False if rank 0 will send no answer."""
        begun = self._begun
        if isinstance(error, PlanMismatchError):
            begun = _IN_STEP  # all ranks raise it together
        elif self._calls.uncertain or (isinstance(error, TransportError) and not isinstance(error, SharedMemoryError)):
            begun = _OUT_OF_STEP  # except SharedMemoryError: the ranks of one host raise it together
        assert self._work is not None
        kind, text = type(error).__name__, str(error)[:_LONGEST_TEXT]
        self._failed_step = self._number
        why = f"{self._work.label} failed on {self._name} with {kind}: {text}"
        self._tell_first(("failed", self._number, begun, kind, why))
        return begun != _OUT_OF_STEP

    def _hear_of(self, error: Exception) -> Exception:
        """Wait for rank 0's answer about a failed step; returns and raises the errors that do() documents."""
        backoff = Backoff(self._transport.check)
        while self._reason is None:
            same = self._alike[1] if self._alike is not None and self._alike[0] == self._number else None
            if same is None and self._closed():
                same = False
            if same is not None:
                if same:
                    return error
                failure = _failure_by(error)(f"{describe(error)} (on {self._name})")
                failure.__cause__ = error  # elastic.run() ends the rank with the cause of a LocalFailureError
                return failure
            try:
                if not self._talk():
                    backoff.pause()
            except TransportError as lost:
                self._end(str(lost), lost)
        raise _failure_by(error)(self._reason) from error

    def stop_all(self, label: str, error: Exception) -> HorovodInternalError:
        """Stop the engine on all ranks after an error outside of steps. Returns the error to raise here."""
        why = f"{label} failed on {self._name} with {describe(error)}"
        with self._talking:
            self._tell_first(("apart", 0, why))
        self._stopped = True
        self._talk()
        self._end(why)
        return HorovodInternalError(why)

    def _end(self, why: str, error: HorovodInternalError | None = None) -> None:
        """Refuse all further steps on this rank."""
        self._reason = self._reason or why
        self._failed(why, error)

    @property
    def _begun(self) -> int:
        return self._calls.begun - self._before

    def leave(self) -> None:
        """Report to rank 0 that this rank has stopped; the caller holds the lock for messages."""
        self._tell_first(("left",))

    def check(self) -> None:
        """Report steps that take long; called at intervals, with the lock for messages held."""
        if self._ended < self._number:
            self._report()
        if self._books is not None:
            self._books.check()

    def _report(self) -> None:
        if self._failing is not None:
            self._compare(self._failing)
        seconds = time.monotonic() - self._began_s
        work = self._work
        if self._reported < self._number and seconds > self._notice_s and work is not None:
            self._reported = self._number
            self._tell_first(("slow", self._number, work.label, self._begun, seconds))

    def on_message(self, sender: int, kind: str, content: Any) -> None:
        """Handle a message about steps; the caller holds the lock for messages."""
        what, *rest = content
        if kind == _UP:
            if self._books is not None:
                self._books.on_message(sender, content)
        elif what == "failing":
            self._failing = (rest[0], rest[1], rest[2])
            self._compare(self._failing)
        elif what == "alike":
            self._alike = (rest[0], rest[1])
        elif what == "stop":
            self._stopped = True
            self._end(rest[0])
        elif what == "where":
            self._tell_first(("there", self._place()))

    def _compare(self, failing: tuple[int, int, str]) -> None:
        """Report to rank 0 if this rank is ahead of a failed rank: it waits in vain, or has gone on without it."""
        number, begun, why = failing
        if number == self._failed_step:
            self._failing = None
        elif self._ended >= number or (self._number == number and self._begun > begun):
            self._failing = None
            self._apart = True
            self._tell_first(("apart", number, why))

    def _place(self) -> StepProgress:
        under_way = self._ended < self._number
        frame = sys._current_frames().get(self._thread) if under_way else None
        stack = "".join(traceback.format_stack(frame)[-_FRAMES:]) if frame is not None else ""
        waits = under_way and time.monotonic() - self._looked_s < _LOOKED_S
        return StepProgress(self._ended, self._begun, waits, stack)

    def _tell_first(self, content: Any) -> None:
        if self._books is not None:
            self._books.on_message(0, content)
        else:
            self._tell(0, _UP, content)

    def _tell(self, rank: int, kind: str, content: Any) -> None:
        with contextlib.suppress(TransportError):  # the ranks that wait for a lost rank get this error in their wait
            self._send(rank, kind, content)


def _failure_by(error: Exception) -> type[HorovodInternalError]:
    return HorovodInternalError if isinstance(error, HvdkitError) else LocalFailureError


def describe(error: Exception) -> str:
    """Return the type and text of an error."""
    return f"{type(error).__name__}: {error}"
