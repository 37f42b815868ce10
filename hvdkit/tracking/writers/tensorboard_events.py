"""TensorBoard's event files, by the package tensorboard alone.

Its EventFileWriter would import TensorFlow where that is installed: seconds, and memory that no rank needs.
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
        # The names of event files begin like this, and rise with time: TensorBoard reads them in that order.
        self._file = (place / f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}").open("xb")
        self._records = RecordWriter(self._file)
        self._records.write(self._event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        self._file.flush()

    def write(self, rows: Sequence[Averages]) -> None:
        now = time.time()
        for step, values in rows:
            numbers = [self._summary.Value(tag=key, simple_value=value) for key, value in values.items()]
            event = self._event(wall_time=now, step=step, summary=self._summary(value=numbers))
            self._records.write(event.SerializeToString())
        self._file.flush()

    def close(self, end: End | None) -> None:
        self._file.close()
