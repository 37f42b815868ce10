"""Requests: operations of a transport that have been begun, to be polled or waited for."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from hvdkit.errors import TransportError
from hvdkit.transport.buffer import Buffer, make_buffer
from hvdkit.transport.polling import Backoff, calls, drive, drive_all


class Request(ABC):
    """An operation in progress. The memory that it reads and writes must not be used until it is done.

    out: the buffer that it fills, or sends. check: called every 0.1 s by wait(); raises RankLostError if a rank for
    which this rank waits has ended.
    """

    out: Buffer
    check: Callable[[], None] | None = None

    @abstractmethod
    def done(self) -> bool:
        """Return, without blocking, whether it is done. Raises TransportError (or RankLostError) if it failed."""

    def wait(self) -> Buffer:
        """Wait until it is done, and return `out`. Raises as done(), `check` and the function of watch_waits() do."""
        try:
            if not self.done():
                waiting = Backoff(self.check)
                waiting.pause()
                while not self.done():
                    waiting.pause()
        except BaseException:
            detach_buffers(self)
            raise
        return self.out


#: The empty buffer of a barrier.
NOTHING = make_buffer(0, "uint8")


class AllRequests(Request):
    """Several requests that are done together."""

    def __init__(self, requests: list[Request], out: Buffer) -> None:
        self._requests, self.out = requests, out

    def done(self) -> bool:
        return all(request.done() for request in self._requests)


class MessageRequest(Request):
    """A message in flight, `request`, that progresses in all waits of the thread that has begun it.

    The other rank may wait for this message before it begins the operation for which this rank waits. A message that
    nobody waits for keeps its memory until it is done.
    """

    def __init__(self, request: Request) -> None:
        self.out = request.out
        self._request, self._done = request, False
        self._failure: Exception | None = None
        self._lock = threading.RLock()
        if not self._step():
            drive(self._step)

    def _step(self) -> bool:
        """Return whether it is done or has failed, after trying to make progress."""
        with self._lock:
            if not self._done and self._failure is None:
                try:
                    self._done = self._request.done()
                except Exception as error:  # done() raises it
                    detach_buffers(self._request)
                    self._failure = error
            return self._done or self._failure is not None

    def done(self) -> bool:
        drive_all()
        if self._step() and self._failure is not None:
            raise self._failure
        return self._done


def check_size(peer: int, nbytes: int, out: Buffer) -> None:
    """Raise TransportError unless a message of `nbytes` bytes fills `out`. peer: the rank that sent it."""
    if nbytes != out.nbytes:
        raise TransportError(
            f"Rank {peer} sent a message of {nbytes} bytes, but {out.nbytes} bytes were expected. Send and receive the "
            "same number of elements of the same dtype."
        )


def closed_meanwhile() -> TransportError:
    """Make the error of an operation whose transport was closed before its end."""
    return TransportError(
        "The transport was closed before this request had completed. Wait for all requests before hvd.shutdown() and "
        "hvd.remove_process_set()."
    )


def closed_before(name: str) -> TransportError:
    """Make the error of a call on a closed transport. name: the transport's name."""
    return TransportError(
        f"This {name} transport is closed: hvd.shutdown() was called, or its process set was removed. Call hvd.init() "
        "or add_process_set() again."
    )


# Operations for which nobody waits any more, because they or a step before them failed. They may still write to their
# memory.
_abandoned: list[object] = []


def detach_buffers(operation: object) -> None:
    """Keep an abandoned operation and its memory alive until the process ends."""
    calls().uncertain = True
    _abandoned.append(operation)
