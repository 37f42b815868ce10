"""Collectives and messages under way, as torch.distributed hands them to the caller.

The collectives of a process group run one after another, in the order of the calls, which is the same on all ranks. A
synchronous one runs on the thread that calls it. An asynchronous one runs on the group's own thread, or on the first
thread that waits for it, if that comes earlier: so who waits at once does not wait for a thread to wake up.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvdkit.errors import TransportError
from hvdkit.transport.polling import drive_all, drives, watch_waits
from hvdkit.transport.request import Request

_TURN_S = 0.001  # between two looks at this thread's messages, while another thread does a collective


class Waits:
    """seconds: for which the works of a process group have held up the threads that called or waited for them."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the seconds of a `with` block."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began


class Done(dist.Work):
    """What was done before the call returned. outputs: the tensors that it filled."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """It is."""
        return True

    is_success = is_completed

    def exception(self) -> BaseException | None:
        """There is none: an error has come out of the call."""
        return None

    def result(self) -> list[torch.Tensor]:
        """The tensors that were filled."""
        return list(self._outputs)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that is done, of the tensors."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future


class _Pending(dist.Work):
    """Something under way. outputs: the tensors that it fills."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = outputs
        self._future: torch.futures.Future[Any] | None = None
        self._guard = threading.Lock()
        self.done, self.error = False, None

    error: BaseException | None

    def end(self, error: BaseException | None = None) -> None:
        """It is done, or has failed."""
        with self._guard:
            self.error, self.done = error, True
            future = self._future
        if future is not None:
            self._settle(future)

    def _settle(self, future: torch.futures.Future[Any]) -> None:
        if self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(self.result())

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensors; fails as wait() does."""
        with self._guard:
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future()
            done = self.done
        if done:
            self._settle(future)
        return future

    def is_completed(self) -> bool:
        """Is it done, or has it failed? Never waits."""
        return self.done

    def is_success(self) -> bool:
        """Is it done, without an error?"""
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        """What it has failed with."""
        return self.error

    def result(self) -> list[torch.Tensor]:
        """The tensors that it fills."""
        return list(self._outputs)

    def synchronize(self) -> None:
        """See wait()."""
        self.wait()


class Queued(_Pending):
    """A collective of a WorkQueue. run: does it, on any thread."""

    def __init__(self, works: WorkQueue, run: Callable[[], None], outputs: Sequence[torch.Tensor]) -> None:
        super().__init__(outputs)
        self._works, self.run = works, run

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is done. Raises what it has failed with, RankLostError where a rank has died."""
        if not self.done:
            with self._works.waits.counting():
                self._works.finish(self)
        if self.error is not None:
            raise self.error
        return True


class WorkQueue:
    """The collectives of a process group, in their order.

    name: of the group, for messages. timeout_s: of each of them; what waits longer fails with a TransportError. check:
    called now and then while one waits; raises RankLostError if a rank of the group has ended. waits: see Waits.
    """

    def __init__(self, name: str, timeout_s: float, check: Callable[[], None], waits: Waits) -> None:
        self.waits = waits
        self._name, self._timeout_s, self._check = name, timeout_s, check
        self._waiting: deque[Queued] = deque()
        self._running = threading.Lock()  # held while a collective runs
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def do(self, run: Callable[[], None], outputs: Sequence[torch.Tensor], *, asynchronous: bool) -> dist.Work:
        """Begin a collective; do it before this returns if it is not asynchronous. Raises what it fails with."""
        if not asynchronous and not self._waiting and self._running.acquire(blocking=False):
            try:
                if not self._waiting:
                    with self.waits.counting():
                        self._run(run)
                    return Done(outputs)
            finally:
                self._running.release()
        work = Queued(self, run, outputs)
        self._waiting.append(work)
        if not asynchronous:
            work.wait()
            return work
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="hvdkit-process-group", daemon=True)
            self._thread.start()
        self._tokens.put(True)
        return work

    def finish(self, work: Queued) -> None:
        """Do collectives, on this thread, until this one is done; or wait for the thread that does it."""
        while not work.done:
            # Other ranks may wait for messages that this thread has begun.
            drive_all()
            if self._running.acquire(timeout=_TURN_S if drives() else -1):
                try:
                    if not work.done:
                        self._next()
                finally:
                    self._running.release()

    def _next(self) -> None:
        if self._waiting:
            work = self._waiting.popleft()
            try:
                self._run(work.run)
            except BaseException as error:
                work.end(error)
                if not isinstance(error, Exception):
                    raise
            else:
                work.end()

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

    def _serve(self) -> None:
        while self._tokens.get():
            with self._running:
                self._next()

    def close(self, why: TransportError) -> None:
        """Have all further collectives fail, and the thread end."""
        self._failure = self._failure or why
        self._tokens.put(False)


class Message(_Pending):
    """A message under way. request: the transport's. after: called when it is done, before the outputs are used."""

    def __init__(
        self,
        request: Request,
        outputs: Sequence[torch.Tensor],
        after: Callable[[], object] | None,
        waits: Waits,
    ) -> None:
        super().__init__(outputs)
        self._request, self._after, self._waits = request, after, waits
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is done. Raises what it has failed with, RankLostError where the other rank has died."""
        with self._lock:
            if not self.done:
                with self._waits.counting():
                    self._try(self._request.wait)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        if not self.done and self._lock.acquire(blocking=False):
            try:
                if not self.done:
                    self._try(self._request.done)
            finally:
                self._lock.release()
        return self.done

    def _try(self, call: Callable[[], object]) -> None:
        try:
            if call() is False:
                return
            if self._after is not None:
                self._after()
        except Exception as error:
            self.end(error)
        else:
            self.end()
