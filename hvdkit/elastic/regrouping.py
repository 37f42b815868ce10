"""Worlds whose ranks another system starts: after a change, surviving ranks wait for new rank numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hvdkit.elastic.state import State
from hvdkit.engine import runtime as engine
from hvdkit.engine.startup import set_next_world
from hvdkit.errors import DuplicateNameError, HorovodInternalError, RanksDisagreeError
from hvdkit.log import logger


class HostSlots(Protocol):
    """Gets this process's rank in the next world from the system that starts the ranks."""

    def watch(self, notify: Callable[[float, int], None] | None) -> None:
        """Register a function to be called when new ranks wait, and at once if some wait; None unregisters.

        notify: State.on_hosts_updated; any thread may call it.
        """

    def synchronized(self) -> None:
        """Report that this rank has the common state."""

    def committed(self) -> None:
        """Report that this rank has made a commit."""

    def check(self) -> None:
        """Raise HorovodInternalError if the world that this rank enters has ended; called while the ranks connect."""

    def wait(self, why: str) -> None:
        """Wait for this process's rank in the next world, and set its variables. why: why the last world ended."""


_places: HostSlots | None = None


def set_places(places: HostSlots) -> None:
    """Make init() and elastic.run of this process, with the setting `elastic`, use these places."""
    global _places
    _places = places
    set_next_world(_NextSlot(places))


def find_places() -> HostSlots | None:
    """Return the places that set_places() has set last; None if none were set."""
    return _places


class _NextSlot:
    """See NextWorld: for a rank whose world ends before the rank has entered it."""

    def __init__(self, places: HostSlots) -> None:
        self._places = places

    def check(self) -> None:
        self._places.check()

    def wait(self, lost: HorovodInternalError) -> None:
        self._places.wait(_explain(lost))


def _explain(lost: HorovodInternalError | None) -> str:
    """Log and return the reason why this rank waits. Raises `lost` if the same error would occur in the next world."""
    if isinstance(lost, (RanksDisagreeError, DuplicateNameError)):
        raise lost
    why = "there are new workers" if lost is None else str(lost)
    logger.warning("%s; waiting for a place among the ranks that are there now.", why.rstrip("."))
    return why


class ExternalRendezvous:
    """See Changes."""

    def __init__(self, places: HostSlots) -> None:
        self._places = places

    def begin(self, state: State) -> None:
        self._notify = state.on_hosts_updated
        state.committed = self._places.committed

    def agree(self) -> None:
        """See Changes. Registers again: State.on_reset() dropped notifications that came while this rank connected."""
        self._places.watch(self._notify)

    def synchronized(self) -> None:
        self._places.synchronized()

    def restart(self, *, lost: HorovodInternalError | None) -> None:
        """See Changes. Starts again if ranks die meanwhile."""
        while True:
            why = _explain(lost)
            try:
                engine.restart(lambda why=why: self._places.wait(why), idle=lost is None)  # type: ignore[misc]
                return
            except HorovodInternalError as error:
                lost = error

    def end(self, state: State, *, well: bool) -> None:
        state.committed = None
        self._places.watch(None)
