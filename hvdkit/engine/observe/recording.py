"""The times that a rank records while it is profiled: of each bucket's stages, and of waits for data.

Times are those of CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: The numbers of a round, before those of its buckets: its number; the times at which backward had ended, and all
#: results were in place; the seconds in which training waited for data since the round before, the time at which the
#: last of these waits ended, and the number of processes that loaded (-1: not known).
HEAD = ("round", "finishing", "ended", "loading_s", "loaded", "loaders")

#: Of each bucket the times at which: copying in begins; copying in has ended; the transport has it; training begins to
#: wait for it (if it does not wait: the next); training sees it reduced; copying out has ended. See observer.py.
STAMPS = ("filling", "ready", "handed", "waiting", "reduced", "taken")

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_KEPT_BYTES = 8 << 20  # of a plan's rounds: the last ones are kept

clock = time.monotonic


@dataclass(frozen=True)
class RankFacts:
    """The rank of a recording.

    node: the same for ranks whose clocks are one. cores: that it has, of its host's. fusion_bytes: the setting.
    link: (latency_s, byte_s, message_s) between hosts, where that was measured; see transport.between.cost.Link.
    """

    rank: int
    size: int
    host: str
    node: str
    transport: str
    cores: float
    fusion_bytes: int
    link: tuple[float, float, float] | None = None


def read_node(host: str) -> str:
    """What this machine has in common with no other that is up; its name where the system does not say."""
    try:
        return f"{host} {_BOOT.read_text().strip()}"
    except OSError:
        return host


@dataclass(frozen=True)
class PlanFacts:
    """The plan of a recording.

    ranks: of its group, by their numbers in the world. nbytes, wire_bytes: of each bucket, in memory and between hosts.
    names: of each bucket, its first tensors. threaded: does a progress thread drive it?
    """

    name: str
    ranks: tuple[int, ...]
    nbytes: tuple[int, ...]
    wire_bytes: tuple[int, ...]
    names: tuple[str, ...]
    threaded: bool

    @property
    def row(self) -> int:
        """How many numbers a round has."""
        return len(HEAD) + len(STAMPS) * len(self.nbytes)


@dataclass
class Rounds:
    """The last rounds of a plan. rows: HEAD, then STAMPS of each bucket, as bytes of float64."""

    facts: PlanFacts
    rows: deque[bytes] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.rows = deque(self.rows, maxlen=max(100, _KEPT_BYTES // (8 * self.facts.row)))


class Recorder:
    """The recorder of this process; records between start() and stop()."""

    def __init__(self) -> None:
        self.on = False
        self._lock = threading.Lock()
        self._plans: list[Rounds] = []
        self._loading_s = self._loaded = 0.0
        self._loaders = -1
        self._starting: list[Callable[[], object]] = []

    def when_on(self, watch: Callable[[], object]) -> None:
        """Call `watch` once, when recording starts first: an adapter then begins to measure waits for data."""
        self._starting.append(watch)

    def start(self) -> None:
        """Start with no rounds. Raises ValueError if it is on."""
        with self._lock:
            if self.on:
                raise ValueError("These steps are being profiled already.")
            self._plans = []
            self._loading_s = 0.0
            self.on = True
        while self._starting:
            self._starting.pop()()

    def stop(self) -> None:
        """Record no more; what is recorded stays until take()."""
        self.on = False

    def loading(self, began: float, ended: float, loaders: int = -1) -> None:
        """Training waited for data between these times.

        loaders: number of processes that load it; 0 if training itself does, -1 if that is not known.
        """
        self._loading_s += ended - began
        self._loaded, self._loaders = ended, loaders

    def add(self, facts: PlanFacts, number: int, finishing: float, ended: float, stamps: Sequence[float]) -> None:
        """A round has ended."""
        with self._lock:
            head = (number, finishing, ended, self._loading_s, self._loaded, self._loaders)
            self._loading_s = 0.0
            rounds = next((each for each in self._plans if each.facts is facts), None)
            if rounds is None:
                rounds = Rounds(facts)
                self._plans.append(rounds)
            rounds.rows.append(array("d", (*head, *stamps)).tobytes())

    def take(self) -> list[Rounds]:
        """Return the rounds recorded since the last take(), and forget them."""
        with self._lock:
            taken, self._plans = self._plans, []
        return taken


RECORDER = Recorder()
