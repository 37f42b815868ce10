"""Changes of the world by Horovod's core, hvdrun, another system that starts the ranks, or the backend's Membership."""

from __future__ import annotations

from typing import Any, Protocol

from hvdkit.elastic.regrouping import ExternalRendezvous, find_places
from hvdkit.elastic.resizing import UlfmResizing
from hvdkit.elastic.restarts import Restarts
from hvdkit.elastic.state import State
from hvdkit.engine import runtime as engine
from hvdkit.errors import HorovodInternalError
from hvdkit.log import logger
from hvdkit.transport.select import find_membership
from hvdkit.transport.small_collectives import allgather_object


class Changes(Protocol):
    """Changes the world during one call of run(). state: gets notifications of ranks that were added or will leave."""

    def begin(self, state: State) -> None:
        """Prepare for training; called once, at the start of run()."""

    def agree(self) -> None:
        """Agree on the new world with its new and surviving ranks; collective."""

    def synchronized(self) -> None:
        """Note that state.sync() has returned, so this rank has the common state."""

    def restart(self, *, lost: HorovodInternalError | None) -> None:
        """Leave the old world and enter the new world; collective.

        lost: the error of a collective; None if ranks are added or leave without a failure. The error is raised again
        if no rank has died, because it then has another cause.
        """

    def end(self, state: State, *, well: bool) -> None:
        """Clean up after training. well: False if it has raised an exception on this rank, other than sys.exit(0)."""


def find_changes() -> Changes | None:
    """Return the Changes of this world; None if it cannot change."""
    current = engine.runtime("elastic.run")
    if current.config.elastic and current.config.elastic_restarts:
        return Restarts(current.config)
    places = find_places()
    if current.config.elastic and places is not None:
        return ExternalRendezvous(places)
    if current.provider.manager is not None:
        return NotifiedChanges(current.provider.manager)
    membership = find_membership(current.transport.backend) if current.config.elastic else None
    return UlfmResizing(current.config, membership) if membership is not None else None


class NotifiedChanges:
    """See Changes: another engine's notification manager reports them. manager: see EngineProvider."""

    _worlds = 0  # largest number of worlds that this process, or a rank of one of its worlds, has been in

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def begin(self, state: State) -> None:
        self._manager.init()
        self._manager.register_listener(state)

    def agree(self) -> None:
        """See Changes. Gives operations other names than in earlier worlds.

        If a world ended with an error, Horovod may still hold some of its operations, and reject new operations with
        the same names.
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
