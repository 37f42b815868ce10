"""Changes of the world, through Horovod's core, hvdrun, what starts the ranks, or the membership of the backend."""

from __future__ import annotations

from typing import Any, Protocol

from hvdkit.elastic.regrouping import Regrouping, find_places
from hvdkit.elastic.resizing import Resizing
from hvdkit.elastic.restarts import Restarts
from hvdkit.elastic.state import State
from hvdkit.engine import runtime as engine
from hvdkit.errors import HorovodInternalError
from hvdkit.log import logger
from hvdkit.transport.select import find_membership
from hvdkit.transport.small_collectives import allgather_object


class Changes(Protocol):
    """How the world changes during one call of run(). state: is told of ranks that have come or will leave."""

    def begin(self, state: State) -> None:
        """Training begins."""

    def settle(self) -> None:
        """Agree on the new world with ranks that have come or are left; collective."""

    def synchronized(self) -> None:
        """state.sync() has returned: this rank has the state of all ranks."""

    def restart(self, *, lost: HorovodInternalError | None) -> None:
        """Leave the old world and enter the new one; collective.

        lost: the error of a collective; None where ranks are added or leave without a failure. Raised again if no rank
        has died, as it then has another reason.
        """

    def end(self, state: State, *, well: bool) -> None:
        """Training ends. well: False if it has raised an exception on this rank, other than sys.exit(0)."""


def find_changes() -> Changes | None:
    """The changes of this world; None where it does not change."""
    current = engine.runtime("elastic.run")
    if current.config.elastic and current.config.elastic_restarts:
        return Restarts(current.config)
    places = find_places()
    if current.config.elastic and places is not None:
        return Regrouping(places)
    if current.provider.manager is not None:
        return NotifiedChanges(current.provider.manager)
    membership = find_membership(current.transport.backend) if current.config.elastic else None
    return Resizing(current.config, membership) if membership is not None else None


class NotifiedChanges:
    """Changes that another engine's notification manager reports. manager: see EngineProvider."""

    _worlds = 0  # that this process, or one that it has met, has been in

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def begin(self, state: State) -> None:
        self._manager.init()
        self._manager.register_listener(state)

    def settle(self) -> None:
        """See Changes. Operations get other names than in earlier worlds.

        Where a world ended with an error Horovod may hold some of its operations still, and take none of the same name.
        """
        current = engine.runtime("elastic.run")
        worlds = max(allgather_object(current.transport, NotifiedChanges._worlds))
        current.provider.set_world_number(worlds)
        NotifiedChanges._worlds = worlds + 1

    def synchronized(self) -> None:
        """See Changes."""

    def restart(self, *, lost: HorovodInternalError | None) -> None:
        if lost is None:
            logger.warning("the hosts of the job have changed; continuing with the new ones")
        else:
            logger.warning("restoring the last commit: %s", lost)
        engine.restart()

    def end(self, state: State, *, well: bool) -> None:
        self._manager.remove_listener(state)
