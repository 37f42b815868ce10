"""A server: a thread of a rank that receives numbers from all ranks, and answers each when its RequestHandler says so.

Messages are sent by a transport, so they work alike over MPI, over Gloo and inside a host. Each server has its own
transport, which only one thread of a process uses: on the server's rank the server's thread, on other ranks the
training thread. MPI's one-sided operations are not used: a server must decide which rank waits, and ULFM repairs no
windows.

A request is HEAD and numbers (n,), an answer is HEAD and numbers (n,), each one message of the same size.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hvdkit.engine.api import Array, Request, Transport, detach_buffers, make_buffer
from hvdkit.errors import RankLostError, TransportError
from hvdkit.log import logger

#: Number of elements before the numbers, of their dtype to keep these aligned: the kind of the message, and in answers
#: values of the service.
HEAD = 4
PUSH, FINISH, STOP, LOST = 1.0, 2.0, 3.0, 4.0
_REQUEST_TAG, _ANSWER_TAG = 1, 2
_IDLE_S = 0.001
_BUSY_S = 0.0002
_CHECK_S = 0.1
_END_S = 5.0


@dataclass(frozen=True)
class Answer:
    """The answer to a rank: numbers (n,), which are copied at once, and up to HEAD - 1 more."""

    numbers: Array
    notes: tuple[float, ...] = ()


class RequestHandler(Protocol):
    """Processes the requests of a server; called by its thread alone."""

    def take(self, rank: int, kind: float, numbers: Array) -> None:
        """Accept a PUSH or FINISH of this rank, which now waits for its answer. numbers: (n,), to be copied."""

    def answers(self, waiting: Collection[int]) -> Mapping[int, Answer]:
        """Return answers for the waiting ranks that may continue. TransportError if one never could."""


class ServerClient:
    """One server from the view of one rank; on the server's own rank it holds the server.

    transport: for this server alone; closed with it.
    root: the server's rank.
    count: of the numbers.
    dtype: of the numbers.
    service: used on the server's rank.

    All ranks construct it together.
    """

    def __init__(self, transport: Transport, root: int, count: int, dtype: str, service: RequestHandler) -> None:
        self._transport, self._root = transport, root
        self._message = make_buffer(HEAD + count, dtype)
        self._message.array[:HEAD] = 0
        self._answer = make_buffer(HEAD + count, dtype)
        self._server = _Server(transport, count, dtype, service) if transport.rank == root else None
        self._asked: Request | None = None
        self._failed = False

    def ask(self, kind: float, numbers: Array | None = None) -> None:
        """Send a request; answer() follows, except after STOP. numbers: (n,)."""
        self._message.array[0] = kind
        if numbers is None:
            self._message.array[HEAD:] = 0
        else:
            np.copyto(self._message.array[HEAD:], numbers)
        if self._server is not None:
            self._server.ask(kind, self._message.array[HEAD:])
            return
        if kind != STOP:
            self._asked = self._transport.ireceive(self._answer, self._root, _ANSWER_TAG)
        try:
            self._transport.send(self._message, self._root, _REQUEST_TAG)
        except TransportError:
            self._failed = True  # so that close() does not wait for the other ranks
            raise

    def answer(self) -> Answer:
        """Wait for the answer, which is valid until the next ask(). Raises RankLostError if a rank has ended."""
        try:
            if self._server is not None:
                array = self._server.answer()
            else:
                assert self._asked is not None
                array = self._asked.wait().array
        except TransportError:
            self._failed = True
            raise
        if array[0] == LOST:
            self._failed = True
            raise RankLostError(
                f"The server of the optimizer, a thread of rank {self._root}, has ended, because a rank has died or "
                "has ended its script without optimizer.finish(). See the output of the other ranks for the cause."
            )
        return Answer(array[HEAD:], tuple(map(float, array[1:HEAD])))

    def close(self) -> None:
        """End the server; collective."""
        with contextlib.suppress(TransportError):
            if not self._failed:
                self.ask(STOP)
        idle = not self._failed
        if self._server is not None:
            idle = self._server.end(at_once=self._failed) and idle
        self._transport.close(idle=idle)


class _Server:
    """The server's thread, and its exchange in memory with the rank that it runs on."""

    def __init__(self, transport: Transport, count: int, dtype: str, service: RequestHandler) -> None:
        self._transport, self._service = transport, service
        self._count, self._dtype = HEAD + count, dtype
        self._own = make_buffer(self._count, dtype).array
        self._wake = threading.Condition()
        self._own_request: tuple[float, Array] | None = None
        self._own_answered = False
        self._failure: TransportError | None = None
        self._leaving = False
        self._stopped: set[int] = set()
        self._waiting: set[int] = set()  # ranks whose answer is delayed
        self._sending: list[Request] = []
        self._receiving: dict[int, Request] = {}
        self._thread = threading.Thread(target=self._run, name="hvdkit-server", daemon=True)
        self._thread.start()

    def ask(self, kind: float, numbers: Array) -> None:
        """Queue a request of this rank, as if it were a message."""
        with self._wake:
            self._own_request, self._own_answered = (kind, numbers), False
            self._wake.notify_all()

    def answer(self) -> Array:
        """See ServerClient.answer."""
        with self._wake:
            while not self._own_answered:
                if self._failure is not None:
                    raise self._failure
                self._wake.wait(_CHECK_S)
        return self._own

    def end(self, *, at_once: bool) -> bool:
        """Wait for the thread to end; returns whether all ranks stopped it.

        It runs until all ranks have shut down, also later ones, as they close the transport together with this one.
        """
        self._leaving = at_once or self._failure is not None
        while self._thread.is_alive() and not self._leaving:
            self._thread.join(_END_S)
            self._leaving = self._failure is not None or not self._transport.checks_ranks
        self._thread.join(2 * _END_S)  # the thread must not use a closed transport
        return not self._thread.is_alive() and self._failure is None and not at_once

    def _run(self) -> None:
        try:
            self._serve()
        except TransportError as error:
            self._failure = error
            self._tell_lost()
        except Exception as error:  # of this module; waiting ranks need it
            logger.exception("The server of rank %s has failed", self._transport.rank)
            self._failure = TransportError(f"The server of this rank has failed: {error}")
            self._tell_lost()
        finally:
            for request in (*self._sending, *self._receiving.values()):
                detach_buffers(request)  # the transport may still access their memory
        with self._wake:
            self._wake.notify_all()

    def _serve(self) -> None:
        transport = self._transport
        peers = [rank for rank in range(transport.size) if rank != transport.rank]
        buffers = {peer: make_buffer(self._count, self._dtype) for peer in peers}
        requests = self._receiving
        for peer in peers:
            requests[peer] = transport.ireceive(buffers[peer], peer, _REQUEST_TAG)
        looked, pause = 0.0, _BUSY_S
        while len(self._stopped) < transport.size and not self._leaving:
            came = False
            with self._wake:
                own, self._own_request = self._own_request, None
            if own is not None:
                self._take(transport.rank, *own)
                came = True
            for peer, request in list(requests.items()):
                if not request.done():
                    continue
                came = True
                array = buffers[peer].array
                self._take(peer, float(array[0]), array[HEAD:])
                if peer in self._stopped:
                    del requests[peer]
                else:
                    requests[peer] = transport.ireceive(buffers[peer], peer, _REQUEST_TAG)
            self._release()
            if self._stopped and self._waiting:
                raise RankLostError(
                    f"Ranks {sorted(self._stopped)} have shut hvdkit down (or reached the end of their script) while "
                    f"ranks {sorted(self._waiting)} still train. Call optimizer.finish() on every rank after its last "
                    "step."
                )
            self._sending = [sent for sent in self._sending if not sent.done()]
            now = time.monotonic()
            if now - looked > _CHECK_S:
                transport.check()
                looked = now
            pause = _BUSY_S if came else min(_IDLE_S, pause * 1.2)
            if not came:
                with self._wake:
                    if self._own_request is None:
                        self._wake.wait(pause)
        if len(self._stopped) < transport.size:
            raise RankLostError("The rank of this server shuts hvdkit down while other ranks still train.")
        for sent in self._sending:
            sent.wait()
        self._sending = []

    def _take(self, rank: int, kind: float, numbers: Array) -> None:
        if kind == STOP:
            self._stopped.add(rank)
            return
        self._service.take(rank, kind, numbers)
        self._waiting.add(rank)

    def _release(self) -> None:
        """Answer the ranks that may continue."""
        for rank, answer in self._service.answers(self._waiting).items():
            self._waiting.discard(rank)
            if rank == self._transport.rank:
                with self._wake:
                    _write(self._own, PUSH, answer)
                    self._own_answered = True
                    self._wake.notify_all()
            else:
                self._send(rank, PUSH, answer)

    def _send(self, rank: int, kind: float, answer: Answer | None = None) -> None:
        message = make_buffer(self._count, self._dtype)
        _write(message.array, kind, answer)
        self._sending.append(self._transport.isend(message, rank, _ANSWER_TAG))

    def _tell_lost(self) -> None:
        """End the other ranks as well: they may not notice the failure that this rank has noticed.

        Ranks that now compute receive this in place of the answer to their next request.
        """
        for rank in set(range(self._transport.size)) - self._stopped - {self._transport.rank}:
            with contextlib.suppress(TransportError):
                self._send(rank, LOST)
        while self._sending and not self._leaving:  # large messages progress only in calls of this rank
            self._sending = [sent for sent in self._sending if not _done(sent)]
            time.sleep(_IDLE_S * 10)


def _done(sent: Request) -> bool:
    """Return whether the request is done, or has failed."""
    try:
        return sent.done()
    except TransportError:
        return True


def _write(message: Array, kind: float, answer: Answer | None) -> None:
    notes = () if answer is None else answer.notes
    message[:HEAD] = (kind, *notes, *[0.0] * (HEAD - 1 - len(notes)))
    message[HEAD:] = 0 if answer is None else answer.numbers
