"""Who knows how the world changes: Horovod's core, hvdrun, or the backend of the transport."""

from __future__ import annotations

from typing import Any, Protocol

from hvdkit.elastic.resizing import Resizing
from hvdkit.elastic.restarts import Restarts
from hvdkit.elastic.state import State
from hvdkit.engine import runtime as engine
from hvdkit.errors import HorovodInternalError
from hvdkit.log import logger
from hvdkit.transport.select import find_membership


class Changes(Protocol):
    """Of one call of run(). state: hears of ranks that have come or are to go."""

    def begin(self, state: State) -> None:
        """Training begins."""

    def settle(self) -> None:
        """Agree with ranks that have come, or outlived others, on which world this is; collective."""

    def synchronized(self) -> None:
        """This rank has the state that all ranks have."""

    def restart(self, *, lost: HorovodInternalError | None) -> None:
        """Leave the world for the one there is now.

        lost: how it was noticed that ranks have died, so that nothing can be said in the old one. Raised again if none
        has, as it then has another reason.
        """

    def end(self, state: State, *, well: bool) -> None:
        """Training is over. well: it has returned; else it has failed on this rank."""


def find_changes() -> Changes | None:
    """Of this world; None where it does not change."""
    made = engine.runtime("elastic.run")
    if made.config.elastic and made.config.elastic_restarts:
        return Restarts(made.config)
    if made.horovod is not None:
        return HorovodChanges(made.horovod.changes())
    membership = find_membership(made.transport.backend) if made.config.elastic else None
    return Resizing(made.config, membership) if membership is not None else None


class HorovodChanges:
    """See Changes. manager: Horovod's notification manager."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def begin(self, state: State) -> None:
        """See Changes."""
        self._manager.init()
        self._manager.register_listener(state)

    def settle(self) -> None:
        """See Changes."""
        engine.begin_generation()

    def synchronized(self) -> None:
        """See Changes."""

    def restart(self, *, lost: HorovodInternalError | None) -> None:
        """See Changes."""
        if lost is None:
            logger.warning("hosts have changed")
        else:
            logger.warning("going back to the last commit: %s", lost)
        engine.restart()

    def end(self, state: State, *, well: bool) -> None:
        """See Changes."""
        self._manager.remove_listener(state)
