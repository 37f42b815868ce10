"""TensorBoard's event files, written with the package tensorboard alone.

Its EventFileWriter would import TensorFlow if that is installed, which takes seconds, and memory that no rank needs.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdkit.optional_import import optional_import
from hvdkit.tracking.rows import Averages
from hvdkit.tracking.writer import End
from hvdkit.tracking.writers.crc32c import masked_crcs

_MOST_IN_AN_EVENT = 100  # the table of masked_crcs() takes 1 KiB for each byte of the longest


class TensorBoardEvents:
    """A Writer: a new event file in the folder. Raises MissingDependencyError, OSError."""

    name = "tensorboard"
    resume: Mapping[str, str] = {}

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        optional_import("tensorboard", "tensorboard")
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        place, now = Path(folder), time.time()
        place.mkdir(parents=True, exist_ok=True)
        # The prefix of event files, with a rising time: TensorBoard reads them in that order.
        self._file = (place / f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}").open("xb")
        self._append([self._event(wall_time=now, file_version="brain.Event:2").SerializeToString()])

    def write(self, rows: Sequence[Averages]) -> None:
        now, events = time.time(), []
        for step, values in rows:
            numbers = [self._summary.Value(tag=key, simple_value=value) for key, value in values.items()]
            for first in range(0, len(numbers), _MOST_IN_AN_EVENT):
                summary = self._summary(value=numbers[first : first + _MOST_IN_AN_EVENT])
                events.append(self._event(wall_time=now, step=step, summary=summary).SerializeToString())
        if events:
            self._append(events)

    def _append(self, events: Sequence[bytes]) -> None:
        """Write records of TFRecord's format: length, its CRC, event, its CRC."""
        lengths = [struct.pack("<Q", len(event)) for event in events]
        crcs = masked_crcs([*lengths, *events]).astype("<u4").tobytes()
        ends = 4 * len(events)
        for at, (length, event) in enumerate(zip(lengths, events, strict=True)):
            first = 4 * at
            self._file.write(length + crcs[first : first + 4] + event + crcs[ends + first : ends + first + 4])
        self._file.flush()

    def close(self, end: End | None) -> None:
        self._file.close()
