"""The last values, to hvdrun, for `hvdrun --metrics-port`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdkit.launcher_channel import announce_value, notify_launcher
from hvdkit.tracking.rows import OWN, Averages
from hvdkit.tracking.writer import End


class HvdrunValues:
    """A Writer. place: see notify_launcher()."""

    name = "hvdrun --metrics-port"
    resume: Mapping[str, str] = {}

    def __init__(self, place: str) -> None:
        self._place = place

    def write(self, rows: Sequence[Averages]) -> None:
        """Write the last values. hvdkit's own series are left out: hvdrun has the sums that they are made of."""
        last = {key: value for _, values in rows for key, value in values.items() if not key.startswith(OWN)}
        for key, value in last.items():
            notify_launcher(announce_value(key, value), self._place)

    def close(self, end: End | None) -> None:
        pass
