"""The thread of rank 0 that writes, so that steps do not wait for a disk or a server."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from hvdkit.log import logger
from hvdkit.tracking.rows import Averages
from hvdkit.tracking.writer import End, Writer

#: Number of windows that may wait for a target that does not answer; a server may hang for hours.
MOST_WAITING = 10_000


class WritingThread:
    """Passes rows to the writers, in order. A writer whose write() fails is reported, and gets no more rows.

    While MOST_WAITING windows wait, new windows are dropped; the first drop is reported.
    """

    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers = list(writers)
        self._end: End | None = None
        self._drops = self._closing = False
        self._called = ""  # name of the writer that is called, or was called last
        self._rows: queue.SimpleQueue[Sequence[Averages] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hvdkit-track", daemon=True)
        self._thread.start()

    def put(self, rows: Sequence[Averages]) -> None:
        """Queue rows for writing; returns at once."""
        if self._rows.qsize() < MOST_WAITING:
            self._drops = False
            self._rows.put(rows)
        elif not self._drops:
            self._drops = True
            logger.warning(
                "track(): %s does not take values: %d windows wait, and those from step %d on are dropped.",
                *(self._called, MOST_WAITING, rows[0][0]),
            )

    def begin_close(self, end: End | None) -> None:
        """Begin close(), which waits for the end; repeated calls do nothing."""
        if not self._closing:
            self._closing, self._end = True, end
            self._rows.put(None)

    def close(self, end: End | None, timeout_s: float) -> None:
        """Write all rows, and close the writers; after timeout_s, returns with a warning if a target does not answer.

        end: see Writer.close().
        """
        self.begin_close(end)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("track(): %s did not take the last values in time.", self._called)

    def _run(self) -> None:
        writing = self._writers
        while (rows := self._rows.get()) is not None:
            writing = [writer for writer in writing if _write(self._calling(writer), rows)]
        failed = [writer for writer in self._writers if writer not in writing]
        for writer in (*writing, *failed):  # the target of a failed one may not answer
            _close(self._calling(writer), self._end)

    def _calling(self, writer: Writer) -> Writer:
        self._called = writer.name
        return writer


def _write(writer: Writer, rows: Sequence[Averages]) -> bool:
    """Write, or report the error; returns whether it succeeded."""
    try:
        writer.write(rows)
    except (Exception, SystemExit) as error:  # a SystemExit would end the thread without a word
        logger.warning(
            "track(): %s cannot be written, so it lacks the values from step %d on; training goes on. %s: %s",
            *(writer.name, rows[0][0], type(error).__name__, error),
        )
        return False
    return True


def _close(writer: Writer, end: End | None) -> None:
    try:
        writer.close(end)
    except (Exception, SystemExit) as error:
        logger.warning("track(): %s was not closed. %s: %s", writer.name, type(error).__name__, error)
