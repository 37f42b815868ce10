"""TensorBoard's event files, written by the package tensorboard.

Its EventFileWriter imports TensorFlow if that is installed, which takes seconds, and memory that no rank needs; its
RecordWriter does not.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdkit.optional_import import optional_import
from hvdkit.tracking.rows import Averages
from hvdkit.tracking.writer import End


class TensorBoardEvents:
    """A Writer: a new event file in the folder. Raises MissingDependencyError, OSError."""

    name = "tensorboard"
    resume: Mapping[str, str] = {}

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        optional_import("tensorboard", "tensorboard")
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        place, now = Path(folder), time.time()
        place.mkdir(parents=True, exist_ok=True)
        # The prefix of event files, with a rising time: TensorBoard reads them in that order.
        path = place / f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter(path.open("xb"))
        self._append(self._event(wall_time=now, file_version="brain.Event:2"))
        self._records.flush()

    def write(self, rows: Sequence[Averages]) -> None:
        now = time.time()
        for step, values in rows:
            numbers = [self._summary.Value(tag=key, simple_value=value) for key, value in values.items()]
            if numbers:
                self._append(self._event(wall_time=now, step=step, summary=self._summary(value=numbers)))
        self._records.flush()

    def _append(self, event: object) -> None:
        self._records.write(event.SerializeToString())  # type: ignore[attr-defined]

    def close(self, end: End | None) -> None:
        self._records.close()
