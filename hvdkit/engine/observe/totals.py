"""What this process has done so far, as sums that only grow: for hvd.track() and for `hvdrun --metrics-port`."""

from __future__ import annotations

import atexit
import functools
import os
import threading
from dataclasses import dataclass

from hvdkit.launcher_channel import Totals, announce_totals, notify_launcher


@dataclass
class Counter:
    """The sums of this process.

    rounds: reductions of the gradients of an optimizer. waited_s: seconds for which training waited in them.
    device_rounds: those in which a GPU's stream waited in place of this process. nbytes: of their buckets.
    samples: given to hvd.track().
    """

    rounds: int = 0
    waited_s: float = 0.0
    nbytes: int = 0
    samples: float = 0.0
    device_rounds: int = 0

    def now(self) -> Totals:
        """A copy."""
        return Totals(self.rounds, self.waited_s, self.nbytes, self.samples, self.device_rounds)


COUNTER = Counter()


class TotalsSender:
    """Sends the sums to hvdrun every `every_s` seconds, and at the end of the process, from a thread of its own.

    place: see notify_launcher().
    """

    def __init__(self, place: str, every_s: float) -> None:
        self._place, self._every_s = place, every_s
        self._ending, self._process = threading.Event(), os.getpid()
        threading.Thread(target=self._run, name="hvdkit-totals", daemon=True).start()
        atexit.register(self.close)

    def close(self) -> None:
        """Send them for the last time."""
        if os.getpid() == self._process and not self._ending.is_set():
            self._ending.set()
            self._send()

    def _run(self) -> None:
        self._send()
        while not self._ending.wait(self._every_s):
            self._send()

    def _send(self) -> None:
        notify_launcher(announce_totals(COUNTER.now()), self._place)


@functools.cache
def send_totals(place: str, every_s: float) -> TotalsSender:
    """The sender of this process, which is there once, also in the next world."""
    return TotalsSender(place, every_s)
