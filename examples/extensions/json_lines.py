"""A writer of hvd.track() in one file: a file with a JSON object for each step.

    {"step": 10, "loss": 0.31, "accuracy": 0.9}

Rank 0 calls a writer with the averages over all ranks, on a thread of its own.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdkit.tracking.rows import Averages
from hvdkit.tracking.writer import End


class JsonLines:
    """A Writer that appends to a file, or begins one. Raises OSError if the file cannot be written.

    path: of the file; missing folders are made.
    """

    name = "json_lines"
    #: Nothing is needed to continue: another process appends to the same file.
    resume: Mapping[str, str] = {}

    def __init__(self, path: str | os.PathLike[str]) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        self._file = target.open("a", encoding="utf-8")

    def write(self, rows: Sequence[Averages]) -> None:
        for step, values in rows:
            # JSON has no nan and no inf: such a value is null.
            known = {key: value if math.isfinite(value) else None for key, value in values.items()}
            self._file.write(json.dumps({"step": step, **known}) + "\n")
        self._file.flush()

    def close(self, end: End | None) -> None:
        if end not in (None, "FINISHED"):
            self._file.write(json.dumps({"end": end}) + "\n")
        self._file.close()
