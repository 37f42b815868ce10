"""Waiting for other ranks: a polling loop that first yields the core and later sleeps.

The owner of a thread that does collectives may watch the thread's waits (watch_waits()), and end them; and may compare
by calls() whether ranks have begun the same collectives. An operation that a thread has begun but does not wait for
progresses in all waits of the thread (drive()), because other ranks may wait for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from hvdkit.errors import TransportError

_YIELDS = 3000  # about 1 ms; a peer that runs on another core has usually arrived by then
_SLEEP_S = 50e-6
_CHECK_S = 0.1  # interval between two checks of the peers


@dataclass
class Calls:
    """Counts the collectives of a thread.

    begun: number of collectives that were begun. uncertain: True if a collective was left before its end, or has sent
    messages to only some ranks. Equal numbers then do not imply that two ranks have done the same.
    """

    begun: int = 0
    uncertain: bool = False


class _Refused(Calls):
    def __setattr__(self, name: str, value: object) -> None:
        if value:
            raise TransportError(_why_refused)
        super().__setattr__(name, value)


_why_refused = ""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls = _Refused() if _why_refused else Calls()
        self.check_wait: Callable[[], None] | None = None
        self.driven: list[Callable[[], bool]] = []


_this_thread = _Thread()


def calls() -> Calls:
    """Return the counts of this thread's collectives."""
    return _this_thread.calls


def refuse_calls(why: str) -> None:
    """Make all later collectives of this process, in any thread, raise TransportError with this text."""
    global _this_thread, _why_refused
    _why_refused, _this_thread = why, _Thread()
    _this_thread.calls = _Refused()


def check_refused() -> None:
    """Raise TransportError after refuse_calls()."""
    if _why_refused:
        raise TransportError(_why_refused)


def watch_waits(check_wait: Callable[[], None] | None) -> Callable[[], None] | None:
    """Register `look` to be called every 0.1 s in this thread's waits for other ranks; an exception ends the wait.

    Returns the previous function, which the caller registers again afterwards.
    """
    before, _this_thread.check_wait = _this_thread.check_wait, check_wait
    return before


def check_wait() -> None:
    """Call the function that watches this thread's waits; for waits without a Backoff."""
    if _this_thread.check_wait is not None:
        _this_thread.check_wait()


def drive(step: Callable[[], bool]) -> None:
    """Register `step` to be called in this thread's waits until it returns True, when it is done. It never raises."""
    if step not in _this_thread.driven:
        _this_thread.driven.append(step)


def drives() -> bool:
    """Return whether functions are registered by drive() for this thread's waits."""
    return bool(_this_thread.driven)


def drive_all() -> None:
    """Call the functions that drive() has registered for this thread."""
    driven = _this_thread.driven
    for step in tuple(driven):
        if step() and step in driven:
            driven.remove(step)


class Backoff:
    """Paces a polling loop and checks the peers meanwhile; each wait has its own object.

    check: called every 0.1 s; raises if the wait cannot end. None if another function checks the peers.
    """

    def __init__(self, check: Callable[[], None] | None = None) -> None:
        self._check = check
        self._turns = 0
        self._next_check = 0.0

    def pause(self) -> None:
        """Leave the core to other threads: yield at first, sleep later."""
        self._turns += 1
        if _this_thread.driven:
            drive_all()
        if self._turns <= _YIELDS:
            os.sched_yield()
            return
        now = time.monotonic()
        if now >= self._next_check:
            if self._next_check:
                check_wait()  # before the check: its error says why a rank left, the check's only that it left
                if self._check is not None:
                    self._check()
            self._next_check = now + _CHECK_S
        time.sleep(_SLEEP_S)
