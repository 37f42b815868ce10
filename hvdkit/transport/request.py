"""Requests: operations of a transport that have been begun, to be asked after or waited for."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from hvdkit.errors import TransportError
from hvdkit.transport.buffer import Buffer, make_buffer
from hvdkit.transport.polling import Backoff, calls, drive, drive_all


class Request(ABC):
    """An operation under way. The memory that it reads and writes is left alone until it is done.

    out: the buffer that it fills, or sends. check: called every 0.1 s by wait(); raises RankLostError if a rank that
    this one waits for has ended.
    """

    out: Buffer
    check: Callable[[], None] | None = None

    @abstractmethod
    def done(self) -> bool:
        """Is it done? Never blocks. Raises TransportError (RankLostError where the dead rank is known) if it failed."""

    def wait(self) -> Buffer:
        """Return `out` when it is done. Raises as done() and `check` do, and what watch_waits() has for this thread."""
        try:
            if not self.done():
                waiting = Backoff(self.check)
                waiting.pause()
                while not self.done():
                    waiting.pause()
        except BaseException:
            leave_behind(self)
            raise
        return self.out


#: What a barrier fills.
NOTHING = make_buffer(0, "uint8")


class AllRequests(Request):
    """Several requests as one."""

    def __init__(self, requests: list[Request], out: Buffer) -> None:
        self._requests, self.out = requests, out

    def done(self) -> bool:
        return all(request.done() for request in self._requests)


class MessageRequest(Request):
    """A message under way, as `request`, which goes on in all waits of the thread that has begun it.

    For the other rank may wait for it before it comes to what this one waits for; and what nobody waits for keeps its
    memory until it is done.
    """

    def __init__(self, request: Request) -> None:
        self.out = request.out
        self._request, self._done = request, False
        self._failure: Exception | None = None
        self._lock = threading.RLock()
        if not self._step():
            drive(self._step)

    def _step(self) -> bool:
        """Is it done, or has it failed?"""
        with self._lock:
            if not self._done and self._failure is None:
                try:
                    self._done = self._request.done()
                except Exception as error:  # for whoever waits for it
                    leave_behind(self._request)
                    self._failure = error
            return self._done or self._failure is not None

    def done(self) -> bool:
        drive_all()
        if self._step() and self._failure is not None:
            raise self._failure
        return self._done


def check_size(peer: int, nbytes: int, out: Buffer) -> None:
    """Raise TransportError unless a message of so many bytes fills `out`. peer: that has sent it."""
    if nbytes != out.nbytes:
        raise TransportError(
            f"Rank {peer} sent a message of {nbytes} bytes, but {out.nbytes} bytes were expected. Send and receive the "
            "same number of elements of the same dtype."
        )


def closed_meanwhile() -> TransportError:
    """The error of an operation whose transport has been closed."""
    return TransportError(
        "The transport was closed before this request had completed. Wait for all requests before hvd.shutdown() and "
        "hvd.remove_process_set()."
    )


def closed_before(name: str) -> TransportError:
    """The error of a call of a transport that has been closed. name: of the transport."""
    return TransportError(
        f"This {name} transport is closed: hvd.shutdown() was called, or its process set was removed. Call hvd.init() "
        "or add_process_set() again."
    )


# What nobody waits for any more, because it or a step before it failed. It may still write to its memory.
_abandoned: list[object] = []


def leave_behind(operation: object) -> None:
    """Keep what nobody waits for any more, with its memory."""
    calls().uncertain = True
    _abandoned.append(operation)
