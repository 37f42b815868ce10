"""Sends the last values to hvdrun, for `hvdrun --metrics-port`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdkit.launcher_channel import announce_value, notify_launcher
from hvdkit.tracking.rows import OWN, Averages
from hvdkit.tracking.writer import End


class HvdrunValues:
    """A Writer to hvdrun. place: see notify_launcher()."""

    name = "hvdrun --metrics-port"
    resume: Mapping[str, str] = {}

    def __init__(self, place: str) -> None:
        self._place = place

    def write(self, rows: Sequence[Averages]) -> None:
        """Send the last values, without hvdkit's own series: hvdrun has the sums behind them."""
        last = {key: value for _, values in rows for key, value in values.items() if not key.startswith(OWN)}
        for key, value in last.items():
            notify_launcher(announce_value(key, value), self._place)

    def close(self, end: End | None) -> None:
        pass
