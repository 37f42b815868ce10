"""A CSV file with a line for each value: step, key, value."""

from __future__ import annotations

import csv
import functools
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdkit.errors import TrackError
from hvdkit.tracking.rows import Averages
from hvdkit.tracking.writer import End

_HEADER = ("step", "key", "value")


class CsvFile:
    """A Writer that appends to an existing file; its lines are complete if the process is killed between two writes.

    Raises OSError if the file cannot be written, TrackError if it has another format.
    """

    name = "csv"
    resume: Mapping[str, str] = {}

    def __init__(self, path: str | os.PathLike[str]) -> None:
        place = Path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        self._file = place.open("a+", newline="", encoding="utf-8")
        self._file.seek(0)
        first = self._file.readline().strip()
        if first and first != ",".join(_HEADER):
            self._file.close()
            raise TrackError(f"csv={str(place)!r} is another file, as it begins with {first[:40]!r}. Choose a new one.")
        if not first:
            self._file.write(",".join(_HEADER) + "\n")
            self._file.flush()

    def write(self, rows: Sequence[Averages]) -> None:
        lines = [f"{step},{_quote(key)},{value!r}\n" for step, values in rows for key, value in values.items()]
        self._file.write("".join(lines))
        self._file.flush()

    def close(self, end: End | None) -> None:
        self._file.close()


@functools.lru_cache(maxsize=1024)
def _quote(key: str) -> str:
    """Return a key as a CSV field, quoted if necessary."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow([key])
    return line.getvalue()
