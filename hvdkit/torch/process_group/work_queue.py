"""The collectives of a process group: one after another, in the order of the calls, which is the same on all ranks.

A synchronous one runs on the thread that calls it. An asynchronous one runs on a thread of the group, or on the first
thread that waits for it, if that comes earlier: so who waits at once does not wait for a thread to wake up.

Callbacks of a collective's future (then()) run on a thread of the group, and may call collectives and wait for them.
These run before what is called after get_future(), on all ranks alike, whenever the callbacks begin; then() is to be
called right after that. Where the callbacks' thread is blocked, another thread of the group does them.
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

_TURN_S = 0.001  # between two looks at this thread's messages, while another thread does a collective
_EXIT_S = 1.0  # for what threads of groups still do when Python ends
_LOOK_S = 5.0  # between two looks at whether callbacks take too long


#: Threads of groups that are not idle: they call torch, or have yet to free objects of torch.
_busy: set[threading.Thread] = set()


@atexit.register
def _wait_until_idle() -> None:
    """A thread that returns to torch's C++ when Python has ended would end the process with SIGABRT."""
    deadline = time.monotonic() + _EXIT_S
    while _busy and time.monotonic() < deadline:
        time.sleep(0.001)


class Queued(Pending):
    """A collective of a WorkQueue.

    run: does it, on any thread. level: of those who have called it. number: of it in that level.
    """

    def __init__(
        self, works: WorkQueue, run: Callable[[], None], outputs: Sequence[torch.Tensor], level: Level, number: int
    ) -> None:
        super().__init__(outputs)
        self._works, self.run, self.level, self._number = works, run, level, number
        self._is_last = False  # called in its level, when get_future() was called
        self._future: torch.futures.Future[Any] | None = None
        self._guard = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is done. Raises what it has failed with, RankLostError where a rank has died."""
        if not self.done:
            with self._works.waits.counting():
                self._works.finish(self)
        if self.error is not None:
            raise self.error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensors; fails as wait() does."""
        with self._guard:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future()
            self._is_last = self.level.called == self._number
            done = self.done
        if done:
            self.settle()
        return self._future

    def end(self, error: BaseException | None) -> Level | None:
        """It is done, or has failed. Returns the level of its callbacks, for settle(); None if that is not needed.

        A new one if no collective was called between this one and get_future(). Otherwise theirs come after that one.
        """
        with self._guard:
            self.error, self.done = error, True
            if self._future is None:
                return None
            return Level() if self._is_last else self.level

    def settle(self) -> None:
        """Complete the future; its callbacks run here."""
        assert self._future is not None
        if self.error is not None:
            self._future.set_exception(self.error)
        else:
            self._future.set_result(self.result())


class Level(deque[Queued]):
    """Collectives that wait, called by the same callbacks, or by none. called: how many were called so far."""

    called = 0


class WorkQueue:
    """The collectives of a process group, in their order.

    name: of the group, for messages. timeout_s: of each of them; what waits longer fails with a TransportError. check:
    called now and then while one waits; raises RankLostError if a rank of the group has ended. waits: see Waits.
    """

    def __init__(self, name: str, timeout_s: float, check: Callable[[], None], waits: Waits) -> None:
        self.waits = waits
        self._name, self._timeout_s, self._check = name, timeout_s, check
        self._state = threading.Lock()  # guards all below
        self._changed = threading.Condition(self._state)  # for threads that wait for a collective
        self._to_do = threading.Condition(self._state)  # for free threads of the group
        #: Collectives that wait: the script's, then those of the callbacks that run after one of these, and so on. Only
        #: those of the last level may run.
        self._levels: list[Level] = [Level()]
        self._running = False
        self._waiting = 0  # threads in _wait()
        self._ended_s = 0.0  # when the last one ended
        self._unsettled: list[tuple[Queued, Level]] = []
        self._free = 0  # threads of the group that are in no callback
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.local()  # .level: of the callbacks that this thread is in

    def do(self, run: Callable[[], None], outputs: Sequence[torch.Tensor], *, asynchronous: bool) -> dist.Work:
        """Begin a collective; do it before this returns if it is not asynchronous. Raises what it fails with."""
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
            if not any(level is one for one in self._levels):  # of callbacks that nothing has waited for
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
        """Do collectives, on this thread, until this one is done; or wait for the threads that do them."""
        while True:
            # Other ranks may wait for messages that this thread has begun.
            drive_all()
            with self._state:
                if work.done:
                    return
                mine = self._take()
                if mine is None:
                    self._wait(self._changed, _TURN_S if drives() else _LOOK_S)
                    continue
            level = self._do(mine)
            if level is not None:  # on another thread, for this one waits for `work` only
                with self._state:
                    self._unsettled.append((mine, level))
                    self._have_thread()
                    self._to_do.notify()
            if mine.error is not None and not isinstance(mine.error, Exception):
                raise mine.error

    def _take(self) -> Queued | None:
        """The collective to run now, if there is one that may; the caller holds the state."""
        levels = self._levels if self._failure is not None else self._levels[-1:]  # what will fail need not wait
        level = next((level for level in reversed(levels) if level), None)
        if self._running or level is None:
            return None
        self._running = True
        return level.popleft()

    def _do(self, work: Queued) -> Level | None:
        """Do what was taken. Returns the level of its callbacks, for which settle() is to be called; None without."""
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
        """No collective runs now; the caller holds the state."""
        self._running, self._ended_s = False, time.monotonic()
        self._announce()

    def _announce(self) -> None:
        """Something has changed; the caller holds the state."""
        if self._waiting:
            self._changed.notify_all()
            if self._levels[-1] and not self._running:
                self._to_do.notify()

    def _wait(self, condition: threading.Condition, seconds: float) -> None:
        """Wait for a change; the caller holds the state. Fails what has waited too long for callbacks to return."""
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
        """Have a thread of the group that is free; the caller holds the state."""
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
        """A collective whose callbacks are to be run, with their level, or one to run; the caller holds the state."""
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
            if self._unsettled or any(self._levels):  # a free thread sees whether it takes too long
                self._have_thread()
        self._settle(work, level)
        with self._state:
            self._free += 1

    def _settle(self, work: Queued, level: Level) -> None:
        """Run the callbacks of a collective, and then what they have called and not waited for."""
        before = getattr(self._thread, "level", self._levels[0])
        self._thread.level = level
        try:
            work.settle()
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
                self._settle(mine, inner)

    def _run(self, run: Callable[[], None]) -> None:
        if self._failure is not None:
            raise self._failure
        deadline = time.monotonic() + self._timeout_s

        def look() -> None:
            self._check()
            if time.monotonic() > deadline:
                raise TransportError(
                    f"A collective of process group {self._name} has waited {self._timeout_s:g} s for other ranks. All "
                    "ranks of the group must call it, in the same order. For slow ones: init_process_group(timeout=)."
                )

        before = watch_waits(look)
        try:
            run()
        except BaseException as error:
            self._failure = error  # the ranks are no longer in step
            raise
        finally:
            watch_waits(before)

    def close(self, why: TransportError) -> None:
        """Have all further collectives fail, and the threads end."""
        with self._state:
            self._failure, self._closed = self._failure or why, True
            self._changed.notify_all()
            self._to_do.notify_all()
