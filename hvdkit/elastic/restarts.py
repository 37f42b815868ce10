"""Worlds of fixed size: when ranks die, hvdrun restarts the job, which continues from the newest checkpoint."""

from __future__ import annotations

import time

from hvdkit.config import Config
from hvdkit.elastic.saver import Saver
from hvdkit.elastic.state import State
from hvdkit.errors import HorovodInternalError, RankLostError
from hvdkit.log import logger

#: Longer than hvdrun takes to end the other ranks when a rank has died.
_ENDED_S = 10.0


class Restarts:
    """See Changes. Without config.elastic_checkpoints nothing is saved, and a restarted job trains from the start."""

    def __init__(self, config: Config) -> None:
        self._directory, self._every_s = config.elastic_checkpoints, config.elastic_save_s
        self._saver: Saver | None = None

    def begin(self, state: State) -> None:
        """See Changes. Continues from the newest checkpoint, if one exists."""
        if self._directory:
            state.load_from(self._directory)
            self._saver = Saver(state, self._directory, self._every_s)

    def agree(self) -> None:
        """See Changes."""

    def synchronized(self) -> None:
        """See Changes."""

    def restart(self, *, lost: HorovodInternalError | None) -> None:
        """See Changes. Raises `lost`; if a rank has died, it first waits for hvdrun to end this process."""
        if isinstance(lost, RankLostError):
            logger.info("waiting for hvdrun to end this rank and restart the job: %s", lost)
            self._close(well=False)  # restores the handlers, so that SIGTERM ends this process again
            time.sleep(_ENDED_S)
        if lost is not None:
            raise lost

    def end(self, state: State, *, well: bool) -> None:
        self._close(well=well)

    def _close(self, *, well: bool) -> None:
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close(well=well)
