"""Backoff that yields: what a rank does while another one is not there yet.

Whoever has a thread do collectives may watch its waits (watch_waits()), also to end them; and may see by what the
thread has begun (calls()) whether ranks have begun the same. What a thread has begun and not waited for goes on in all
of its waits (drive()): other ranks may wait for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from hvdkit.errors import TransportError

_YIELDS = 3000  # about 1 ms, by when a peer that runs on another core has arrived
_SLEEP_S = 50e-6
_CHECK_S = 0.1  # how often the peers are looked after


@dataclass
class Calls:
    """What a thread has asked of other ranks.

    begun: collectives. uncertain: has one been left before its end, or has it sent messages to some ranks only? Then
    equal numbers of collectives do not say that two ranks have done the same.
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
        self.look: Callable[[], None] | None = None
        self.driven: list[Callable[[], bool]] = []


_this_thread = _Thread()


def calls() -> Calls:
    """What this thread has asked of other ranks."""
    return _this_thread.calls


def refuse_calls(why: str) -> None:
    """Raise TransportError with this text for all that this process asks of other ranks from now on, in any thread."""
    global _this_thread, _why_refused
    _why_refused, _this_thread = why, _Thread()
    _this_thread.calls = _Refused()


def check_refused() -> None:
    """Raise TransportError after refuse_calls()."""
    if _why_refused:
        raise TransportError(_why_refused)


def watch_waits(look: Callable[[], None] | None) -> Callable[[], None] | None:
    """Have `look` called every 0.1 s in this thread's waits for other ranks; it may raise, which ends the wait.

    Returns what has been called so far, to be given back afterwards.
    """
    before, _this_thread.look = _this_thread.look, look
    return before


def look() -> None:
    """Call what watches this thread's waits; for waits that are no Backoff."""
    if _this_thread.look is not None:
        _this_thread.look()


def drive(step: Callable[[], bool]) -> None:
    """Have `step` called in this thread's waits until it returns True: there is nothing more to do. It never raises."""
    if step not in _this_thread.driven:
        _this_thread.driven.append(step)


def drives() -> bool:
    """Is there anything that this thread's waits have to drive?"""
    return bool(_this_thread.driven)


def drive_all() -> None:
    """Call what this thread's waits have to drive."""
    driven = _this_thread.driven
    for step in tuple(driven):
        if step() and step in driven:
            driven.remove(step)


class Backoff:
    """Paces a polling loop and looks after the peers meanwhile; one object for one wait.

    check: called every 0.1 s; raises if the wait is hopeless. None where somebody else looks after the peers.
    """

    def __init__(self, check: Callable[[], None] | None = None) -> None:
        self._check = check
        self._turns = 0
        self._next_check = 0.0

    def pause(self) -> None:
        """Give the core to whoever needs it: yield at first, sleep later."""
        self._turns += 1
        if _this_thread.driven:
            drive_all()
        if self._turns <= _YIELDS:
            os.sched_yield()
            return
        now = time.monotonic()
        if now >= self._next_check:
            if self._next_check:
                look()  # before the check: why a rank has left says more than that it has
                if self._check is not None:
                    self._check()
            self._next_check = now + _CHECK_S
        time.sleep(_SLEEP_S)
