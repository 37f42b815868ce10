"""The collectives of a process group: run one at a time, in the order of the calls, which is equal on all ranks.

A synchronous collective runs on the calling thread. An asynchronous one runs on a thread of the group, or on the first
thread that waits for it, if that comes earlier: so a caller that waits at once does not wait for a thread to wake up.

Callbacks of a collective's future (then()) run on a thread of the group, and may call collectives and wait for them.
These collectives run before those that are called after get_future(), on all ranks alike, regardless of when the
callbacks begin; call then() right after get_future(), and get_future() right after the collective. If other collectives
were called in between, those of the callbacks come after them, but their order to later ones is that of threads, which
may differ between ranks, as over Gloo. While the callbacks' thread is blocked, another thread of the group runs the
collectives.

wait() returns when the collective is done, and its callbacks may still run then; Gloo's wait() returns after them.
torch runs a callback that is added to a completed future at once, in then(), so it may precede callbacks that were
added earlier: torch promises no order of the callbacks of a future. Wait for the future that then() returns.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvdkit.errors import TransportError
from hvdkit.torch.process_group.works import Done, Pending, Waits
from hvdkit.transport.polling import drive_all, drives, watch_waits

_TURN_S = 0.001  # between two polls of this thread's messages, while another thread runs a collective
_EXIT_S = 1.0  # for the remaining work of groups' threads when Python ends
_LOOK_S = 5.0  # between two checks whether callbacks take too long


#: Threads of groups that are not idle: they call torch, or still hold objects of torch.
_busy: set[threading.Thread] = set()


@atexit.register
def _wait_until_idle() -> None:
    """Wait for groups' threads: one that returns to torch's C++ code after Python's end would abort with SIGABRT."""
    deadline = time.monotonic() + _EXIT_S
    while _busy and time.monotonic() < deadline:
        time.sleep(0.001)


class Queued(Pending):
    """A collective of a WorkQueue.

    run: runs it, on any thread.
    level: of its callers.
    number: in that level.
    """

    def __init__(
        self, works: WorkQueue, run: Callable[[], None], outputs: Sequence[torch.Tensor], level: Level, number: int
    ) -> None:
        super().__init__(outputs)
        self._works, self.run, self.level, self._number = works, run, level, number
        self._is_last = False  # whether it was the last call of its level when get_future() was called
        self._future: torch.futures.Future[Any] | None = None
        self._guard = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the collective is done. Raises its error, RankLostError if a rank has died."""
        if not self.done:
            with self._works.waits.counting():
                self._works.finish(self)
        if self.error is not None:
            raise self.error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors; it fails as wait() does."""
        with self._guard:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future()
            self._is_last = self.level.called == self._number
            done = self.done
        if done:
            self.run_callbacks()
        return self._future

    def end(self, error: BaseException | None) -> Level | None:
        """Record the end, or the failure. Returns the level of its callbacks, for settle(); None without callbacks.

        The level is new if no collective was called between this one and get_future(); else it is this collective's
        level.
        """
        with self._guard:
            self.error, self.done = error, True
            if self._future is None:
                return None
            return Level() if self._is_last else self.level

    def run_callbacks(self) -> None:
        """Complete the future; its callbacks run in this call."""
        assert self._future is not None
        if self.error is not None:
            self._future.set_exception(self.error)
        else:
            self._future.set_result(self.result())


class Level(deque[Queued]):
    """Waiting collectives, called by the same callbacks, or outside of callbacks. called: number of calls so far."""

    called = 0


class WorkQueue:
    """The collectives of a process group, in order.

    name: of the group, for messages.
    timeout_s: of each collective; one that waits longer fails with a TransportError.
    check: called regularly during waits; raises RankLostError if a rank of the group has ended.
    waits: see Waits.
    """

    def __init__(self, name: str, timeout_s: float, check: Callable[[], None], waits: Waits) -> None:
        self.waits = waits
        self._name, self._timeout_s, self._check = name, timeout_s, check
        self._state = threading.Lock()  # guards all attributes below
        self._changed = threading.Condition(self._state)  # for threads that wait for a collective
        self._to_do = threading.Condition(self._state)  # for free threads of the group
        #: Waiting collectives: the script's, then those of the callbacks that run after one of these, and so on. Only
        #: collectives of the last level may run.
        self._levels: list[Level] = [Level()]
        self._running = False
        self._waiting = 0  # number of threads in _wait()
        self._ended_s = 0.0  # time of the last collective's end
        self._unsettled: list[tuple[Queued, Level]] = []
        self._free = 0  # number of the group's threads outside of callbacks
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.local()  # level: of this thread's callbacks

    def do(self, run: Callable[[], None], outputs: Sequence[torch.Tensor], *, asynchronous: bool) -> dist.Work:
        """Begin a collective; run it before returning unless it is asynchronous. Raises its error."""
        level = getattr(self._thread, "level", self._levels[0])
        if not asynchronous:
            with self._state:
                at_once = not self._running and not level and level is self._levels[-1]
                if at_once:
                    self._running = True
                    level.called += 1
            if at_once:
                try:
                    with self.waits.counting():
                        self._run(run)
                finally:
                    with self._state:
                        self._end()
                return Done(outputs)
        with self._state:
            if not any(level is one for one in self._levels):  # called by callbacks whose level has ended
                level = self._levels[0]
            level.called += 1
            work = Queued(self, run, outputs, level, level.called)
            level.append(work)
            if asynchronous:
                self._have_thread()
            self._announce()
        if not asynchronous:
            work.wait()
        return work

    def finish(self, work: Queued) -> None:
        """Run collectives on this thread until this one is done, or wait for the threads that run them."""
        while True:
            # Other ranks may wait for messages of this thread that are under way.
            drive_all()
            with self._state:
                if work.done:
                    return
                mine = self._take()
                if mine is None:
                    self._wait(self._changed, _TURN_S if drives() else _LOOK_S)
                    continue
            level = self._do(mine)
            if level is not None:  # on another thread, as this one waits for `work` only
                with self._state:
                    self._unsettled.append((mine, level))
                    self._have_thread()
                    self._to_do.notify()
            if mine.error is not None and not isinstance(mine.error, Exception):
                raise mine.error

    def _take(self) -> Queued | None:
        """Return the collective to run now, or None; the caller holds the lock."""
        levels = self._levels if self._failure is not None else self._levels[-1:]  # failing collectives need not wait
        level = next((level for level in reversed(levels) if level), None)
        if self._running or level is None:
            return None
        self._running = True
        return level.popleft()

    def _do(self, work: Queued) -> Level | None:
        """Run a collective of _take(). Returns the level of its callbacks, for which to call settle(); None without."""
        error = None
        try:
            self._run(work.run)
        except BaseException as raised:
            error = raised
        with self._state:
            level = work.end(error)
            if level is not None and level is not work.level:
                self._levels.append(level)
            self._end()
        return level

    def _end(self) -> None:
        """Record that no collective runs now; the caller holds the lock."""
        self._running, self._ended_s = False, time.monotonic()
        self._announce()

    def _announce(self) -> None:
        """Notify waiting threads of a change; the caller holds the lock."""
        if self._waiting:
            self._changed.notify_all()
            if self._levels[-1] and not self._running:
                self._to_do.notify()

    def _wait(self, condition: threading.Condition, seconds: float) -> None:
        """Wait for a change; the caller holds the lock. Fails collectives that wait too long for callbacks."""
        self._waiting += 1
        condition.wait(min(seconds, self._timeout_s))
        self._waiting -= 1
        held = not self._running and not self._levels[-1] and any(self._levels)
        if held and self._failure is None and time.monotonic() > self._ended_s + self._timeout_s:
            self._failure = TransportError(
                f"A collective of process group {self._name} has waited {self._timeout_s:g} s for a callback (then()) "
                "of an earlier one to return. A callback may wait for collectives that it calls itself, not for those "
                "that were called after its own. For slow callbacks: init_process_group(timeout=)."
            )
            self._changed.notify_all()
            self._to_do.notify()

    def _have_thread(self) -> None:
        """Start a thread of the group unless one is free; the caller holds the lock."""
        if not self._free:
            self._free += 1
            threading.Thread(target=self._serve, name="hvdkit-process-group", daemon=True).start()

    def _serve(self) -> None:
        """Run collectives and callbacks until the group is closed: the loop of a thread of the group."""
        thread = threading.current_thread()
        while True:
            _busy.add(thread)
            with self._state:
                while (item := self._next()) is None:
                    _busy.discard(thread)
                    if self._closed:
                        self._free -= 1
                        return
                    self._wait(self._to_do, _LOOK_S)
                    _busy.add(thread)
            self._serve_one(*item)
            del item  # frees objects of torch

    def _next(self) -> tuple[Queued, Level | None] | None:
        """Return a collective with its callbacks' level, or one to run, or None; the caller holds the lock."""
        if self._unsettled:
            return self._unsettled.pop()
        work = self._take()
        return None if work is None else (work, None)

    def _serve_one(self, work: Queued, level: Level | None) -> None:
        level = self._do(work) if level is None else level
        if level is None:
            return
        with self._state:
            self._free -= 1
            if self._unsettled or any(self._levels):  # a free thread checks whether it takes too long
                self._have_thread()
        self._run_callbacks(work, level)
        with self._state:
            self._free += 1

    def _run_callbacks(self, work: Queued, level: Level) -> None:
        """Run the callbacks of a collective, and then the collectives that they have called and not waited for."""
        before = getattr(self._thread, "level", self._levels[0])
        self._thread.level = level
        try:
            work.run_callbacks()
        finally:
            self._thread.level = before
        while level is not work.level:
            with self._state:
                is_last = level is self._levels[-1] and not self._running
                if is_last and not level:
                    self._levels.pop()
                    self._announce()
                    return
                mine = self._take() if is_last else None
                if mine is None:
                    self._wait(self._changed, _LOOK_S)
                    continue
            inner = self._do(mine)
            if inner is not None:
                self._run_callbacks(mine, inner)

    def _run(self, run: Callable[[], None]) -> None:
        if self._failure is not None:
            raise self._failure
        deadline = time.monotonic() + self._timeout_s

        def check_wait() -> None:
            self._check()
            if time.monotonic() > deadline:
                raise TransportError(
                    f"A collective of process group {self._name} has waited {self._timeout_s:g} s for other ranks. All "
                    "ranks of the group must call it, in the same order. For slow ones: init_process_group(timeout=)."
                )

        before = watch_waits(check_wait)
        try:
            run()
        except BaseException as error:
            self._failure = error  # the ranks are no longer synchronized
            raise
        finally:
            watch_waits(before)

    def close(self, why: TransportError) -> None:
        """Make all further collectives fail, and end the threads."""
        with self._state:
            self._failure, self._closed = self._failure or why, True
            self._changed.notify_all()
            self._to_do.notify_all()
