"""The interface of an engine: named operations among the ranks of one group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from hvdkit.engine.named.joining import Joining
from hvdkit.engine.named.operation import Action, Announcement, Operation
from hvdkit.engine.observe.stragglers import Window
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import Buffer


class StallReport(Protocol):
    """What the first rank is told of waits that are no operations: who waits, and so who is missing.

    report_window: how long this rank waited in some rounds of a plan. notice_s: after how many seconds a wait in a
    bucket is announced with submit() and withdraw().
    """

    notice_s: float

    @property
    def report_window(self) -> Callable[[Window], None]: ...

    def submit(self, name: str, asked: Announcement, buffers: Sequence[Buffer]) -> Operation:
        """See Engine.submit."""

    def withdraw(self, name: str) -> None:
        """Take back an operation without buffers, if it is still under way."""


class Engine(Protocol):
    """Named operations among the ranks of a transport; opened and closed by all of them together.

    transport: for steps of several operations. ranks: by their numbers in the world. joining: what this rank does for
    the others when it has joined. stall_report: None if the engine has none. takes_tensors: may buffers be a
    framework's tensors, on any device? thread: the engine's own, which ends after leave(); None if it has none.
    """

    @property
    def transport(self) -> Transport: ...

    @property
    def ranks(self) -> Sequence[int]: ...

    @property
    def stall_report(self) -> StallReport | None: ...

    @property
    def thread(self) -> threading.Thread | None: ...

    joining: Joining
    takes_tensors: bool

    @property
    def stopped(self) -> bool:
        """Have all ranks been stopped for an error of one? Then they are in different collectives."""

    def who(self, rank: int) -> str:
        """Name a rank of this engine for a message."""

    def make_name(self, kind: str) -> str:
        """A name for an operation without one: the n-th of its kind here and so on every rank."""

    def count(self, kind: str) -> int:
        """How many of a kind there have been with this one, from 1; the same on every rank where the order is."""

    def submit(self, name: str, asked: Announcement, buffers: Sequence[Buffer]) -> Operation:
        """Begin an operation; it is done some time after every rank has begun it.

        buffers: left alone by the caller until then.
        Raises DuplicateNameError if an operation of this name is still under way here, HorovodInternalError if the
        engine has failed, TypeError for what it cannot do with a dtype.
        """

    def do(
        self, name: str, asked: Announcement, buffers: Sequence[Buffer], *, action: Action | None = None
    ) -> Operation:
        """Begin an operation and return when it is done; raises what it failed with, and what submit() raises.

        action: see Operation.
        """

    def wait(self, operation: Operation) -> None:
        """Return when the operation is done; raises what it failed with."""

    def drive(self) -> bool:
        """Do what can be done now; True if anything moved."""

    def join(self) -> Operation:
        """Begin to take part in the others' operations with zeros until all ranks have joined."""

    def leave(self, why: str) -> None:
        """Tell the others that this rank takes no further part; not collective. why: follows its name."""

    def close(self, *, idle: bool = True) -> None:
        """Free what is the engine's, the transport too; collective. idle: see Transport.close."""
