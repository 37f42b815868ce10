"""Worlds whose ranks another system starts: those that are left wait for their places in a new one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hvdkit.elastic.state import State
from hvdkit.engine import runtime as engine
from hvdkit.engine.startup import set_next_world
from hvdkit.errors import DuplicateNameError, HorovodInternalError, RanksDisagreeError
from hvdkit.log import logger


class Places(Protocol):
    """Where the system that starts the ranks tells this one its place. Any thread may call `notify`."""

    def watch(self, notify: Callable[[float, int], None] | None) -> None:
        """Call `notify` when ranks are there to be taken in, and now if they are there; None: not any more.

        notify: State.on_hosts_updated.
        """

    def synchronized(self) -> None:
        """This rank has the state of all ranks."""

    def committed(self) -> None:
        """This rank has made a commit."""

    def check(self) -> None:
        """Raise HorovodInternalError if the world of this rank's place has ended; called while the ranks connect."""

    def wait(self, why: str) -> None:
        """Wait for this rank's place in the next world, and set its variables. why: the last one has ended."""


_places: Places | None = None


def set_places(places: Places) -> None:
    """From now on init() and elastic.run of this process, with the setting elastic, get their places here."""
    global _places
    _places = places
    set_next_world(_NextPlace(places))


def find_places() -> Places | None:
    """What was set last; None where nothing was."""
    return _places


class _NextPlace:
    """See NextWorld: for a rank whose world ends before it is in it."""

    def __init__(self, places: Places) -> None:
        self._places = places

    def check(self) -> None:
        self._places.check()

    def wait(self, lost: HorovodInternalError) -> None:
        self._places.wait(_explain(lost))


def _explain(lost: HorovodInternalError | None) -> str:
    """Say, and return, why this rank waits for a place. Raises `lost` where the same would come in the next world."""
    if isinstance(lost, (RanksDisagreeError, DuplicateNameError)):
        raise lost
    why = "there are new workers" if lost is None else str(lost)
    logger.warning("%s; waiting for a place among the ranks that are there now.", why.rstrip("."))
    return why


class Regrouping:
    """See Changes."""

    def __init__(self, places: Places) -> None:
        self._places = places

    def begin(self, state: State) -> None:
        self._notify = state.on_hosts_updated
        state.committed = self._places.committed

    def settle(self) -> None:
        """See Changes. Watches again: State.on_reset() has dropped what was told while this rank entered the world."""
        self._places.watch(self._notify)

    def synchronized(self) -> None:
        self._places.synchronized()

    def restart(self, *, lost: HorovodInternalError | None) -> None:
        """See Changes. If ranks die meanwhile it begins again."""
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
