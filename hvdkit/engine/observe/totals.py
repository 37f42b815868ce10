"""Totals of this process so far, which only grow: for hvd.track() and for `hvdrun --metrics-port`."""

from __future__ import annotations

import atexit
import functools
import os
import threading
from dataclasses import dataclass

from hvdkit.launcher_channel import Totals, announce_totals, notify_launcher


@dataclass
class Counter:
    """The totals of this process.

    rounds: number of reductions of an optimizer's gradients.
    waited_s: seconds for which training waited in these rounds.
    nbytes: bytes of the buckets of these rounds.
    samples: number of samples passed to hvd.track().
    device_rounds: number of rounds in which a GPU's stream waited instead of this process.
    """

    rounds: int = 0
    waited_s: float = 0.0
    nbytes: int = 0
    samples: float = 0.0
    device_rounds: int = 0

    def now(self) -> Totals:
        """Return a copy of the totals."""
        return Totals(self.rounds, self.waited_s, self.nbytes, self.samples, self.device_rounds)


COUNTER = Counter()


@functools.cache
def send_totals(place: str, every_s: float) -> None:
    """Send the totals to hvdrun every `every_s` seconds, and at the end of the process, from a thread of its own.

    A process has one such thread, which goes on in the next world. place: see notify_launcher().
    """
    ending, process = threading.Event(), os.getpid()

    def send() -> None:
        notify_launcher(announce_totals(COUNTER.now()), place)

    def run() -> None:
        send()
        while not ending.wait(every_s):
            send()

    def close() -> None:
        if os.getpid() == process and not ending.is_set():
            ending.set()
            send()

    threading.Thread(target=run, name="hvdkit-totals", daemon=True).start()
    atexit.register(close)
