"""Mailboxes: short messages between ranks, without waiting, by which ranks agree on named operations."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Protocol

from hvdkit.errors import HorovodInternalError, TransportError
from hvdkit.transport.polling import watch_waits


class Mailbox(Protocol):
    """Exchanges messages among the ranks of a transport. From one rank to another they arrive in the order of sending.

    star: True if only rank 0 can exchange messages with each other rank; False if any two ranks can.
    """

    star: bool

    def send(self, rank: int, message: bytes) -> None:
        """Send a message to a rank, which may be this rank itself; returns at once."""

    def receive(self) -> list[tuple[int, bytes]]:
        """Return all messages that have arrived, as (sender, message)."""

    def close(self, *, idle: bool = True) -> None:
        """Close the mailbox; collective. Messages not yet received are lost. idle: see Transport.close."""


class LocalMailbox:
    """The Mailbox of a group of one rank."""

    star = True

    def __init__(self) -> None:
        self._messages: list[tuple[int, bytes]] = []

    def send(self, rank: int, message: bytes) -> None:
        self._messages.append((rank, message))

    def receive(self) -> list[tuple[int, bytes]]:
        messages, self._messages = self._messages, []
        return messages

    def close(self, *, idle: bool = True) -> None:
        self._messages.clear()


class OpeningMailbox:
    """A mailbox whose opening is collective: a thread opens it, and messages wait until it is open.

    So the first rank that uses a group does not wait for the others. opening: opens the mailbox; collective, with no
    other operation in progress on that transport. check: raises if a rank of the group has ended, see Transport.check.
    As for every mailbox, one thread at a time calls the methods.
    """

    star = True

    def __init__(self, opening: Callable[[], Mailbox], check: Callable[[], None]) -> None:
        self._opening, self._check = opening, check
        self._mailbox: Mailbox | None = None
        self._error: HorovodInternalError | None = None
        self._waiting: list[tuple[int, bytes]] = []
        self._ending = False
        self._thread = threading.Thread(target=self._open, name="hvdkit-opening", daemon=True)
        _openings.append(self._thread)
        self._thread.start()

    def _open(self) -> None:
        watch_waits(self._look)
        try:
            self._mailbox = self._opening()
        except HorovodInternalError as error:
            self._error = error
        finally:
            _openings.remove(self._thread)

    def _look(self) -> None:
        """End the wait for ranks that will not come."""
        if self._ending or not threading.main_thread().is_alive():
            raise TransportError(
                "hvdkit was shut down, or this process set was removed, before all ranks of the set had used it. Have "
                "each of them do an operation on the set first."
            )
        self._check()

    def _opened(self) -> Mailbox | None:
        if self._error is not None:
            raise self._error
        if self._mailbox is not None and self._waiting:
            for rank, message in self._waiting:
                self._mailbox.send(rank, message)
            self._waiting = []
        return self._mailbox

    def send(self, rank: int, message: bytes) -> None:
        mailbox = self._opened()
        if mailbox is None:
            self._waiting.append((rank, message))
        else:
            mailbox.send(rank, message)

    def receive(self) -> list[tuple[int, bytes]]:
        """See Mailbox.receive. Raises the error of the opening if it failed."""
        mailbox = self._opened()
        return [] if mailbox is None else mailbox.receive()

    def close(self, *, idle: bool = True) -> None:
        """See Mailbox.close. If idle is True, all ranks have begun to open the mailbox."""
        self._ending = not idle
        self._thread.join(None if idle else _END_S)
        if self._mailbox is not None:
            self._mailbox.close(idle=idle)


_END_S = 2.0  # _look() is called every 0.1 s in a wait, and the machine may be busy
_openings: list[threading.Thread] = []


@atexit.register
def _end_openings() -> None:
    """Wait, at most _END_S for all, until these threads have left MPI, because MPI may be finalized after this."""
    deadline = time.monotonic() + _END_S
    for thread in _openings[:]:  # each removes itself
        thread.join(max(0.0, deadline - time.monotonic()))
