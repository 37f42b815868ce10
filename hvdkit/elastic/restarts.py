"""Worlds that stay as they are: when ranks die, hvdrun starts the job again, and it goes on from a commit on a disk."""

from __future__ import annotations

import time

from hvdkit.config import Config
from hvdkit.elastic.saver import Saver
from hvdkit.elastic.state import State
from hvdkit.errors import HorovodInternalError, RankLostError
from hvdkit.log import logger

#: What hvdrun needs to end the ranks of a job of which one has died, and more.
_ENDED_S = 10.0


class Restarts:
    """See Changes. Without config.elastic_checkpoints nothing is kept, and each start is from the beginning."""

    def __init__(self, config: Config) -> None:
        self._directory, self._every_s = config.elastic_checkpoints, config.elastic_save_s
        self._saver: Saver | None = None

    def begin(self, state: State) -> None:
        """See Changes. Goes on from the newest checkpoint, if there is one."""
        if self._directory:
            state.load_from(self._directory)
            self._saver = Saver(state, self._directory, self._every_s)

    def settle(self) -> None:
        """See Changes."""

    def synchronized(self) -> None:
        """See Changes."""

    def restart(self, *, lost: HorovodInternalError | None) -> None:
        """See Changes. Raises `lost`, an error that would come again; at a rank's death hvdrun ends this one before."""
        if isinstance(lost, RankLostError):
            logger.info("waiting for hvdrun to end this rank, and start the job again: %s", lost)
            self._close(well=False)  # SIGTERM is for this process again
            time.sleep(_ENDED_S)
        if lost is not None:
            raise lost

    def end(self, state: State, *, well: bool) -> None:
        """See Changes."""
        self._close(well=well)

    def _close(self, *, well: bool) -> None:
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close(well=well)
