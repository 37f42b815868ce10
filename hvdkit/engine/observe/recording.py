"""The recorder of a profiled rank: times of each bucket's stages, and of waits for data.

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

from hvdkit.engine.observe.device_clock import READINGS

#: The first numbers of a round's row: its number; the time at which backward had ended; the time at which all results
#: were in place; the seconds of waiting for data since the round before; the time at which the last of these waits
#: ended; the number of loading processes (-1: not known).
HEAD = ("round", "finishing", "ended", "loading_s", "loaded", "loaders")

#: Times of each bucket: filling begins; filling has ended; the transport has started it; training begins to wait for it
#: (the next one if it does not wait); training finds it reduced; draining has ended. See observer.py.
STAMPS = ("filling", "ready", "handed", "waiting", "reduced", "taken")

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MOST_BYTES = 8 << 20  # of a plan's last rounds

clock = time.monotonic


@dataclass(frozen=True)
class RankFacts:
    """The rank of a recording.

    node: equal for ranks that share a clock. cores: number of cores that this rank has. fusion_bytes: the setting.
    link: (latency_s, byte_s, message_s) between hosts if measured; see transport.between.select.Link.
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
    """A name of the running kernel: the host's name with the kernel's boot id, where there is one."""
    try:
        return f"{host} {_BOOT.read_text().strip()}"
    except OSError:
        return host


@dataclass(frozen=True)
class PlanFacts:
    """The plan of a recording.

    ranks: of its group, by their numbers in the world. nbytes, wire_bytes: of each bucket, in memory and between hosts.
    names: of the first tensors of each bucket. threaded: does a progress thread drive it?
    parts: of steps on a mesh, which have no buckets: what the seconds of a row are, see torch/parallel/meter.py.
    pipeline: of these: its ranks, stages of each, and micro-batches; () without one.
    """

    name: str
    ranks: tuple[int, ...]
    nbytes: tuple[int, ...]
    wire_bytes: tuple[int, ...]
    names: tuple[str, ...]
    threaded: bool
    parts: tuple[str, ...] = ()
    pipeline: tuple[int, ...] = ()

    @property
    def row(self) -> int:
        """Length of a round's row."""
        if self.parts:
            return len(HEAD) + len(self.parts)
        return len(HEAD) + len(STAMPS) * len(self.nbytes)


@dataclass
class Rounds:
    """The last rounds of a plan. rows: HEAD, then STAMPS of each bucket, as bytes of float64."""

    facts: PlanFacts
    rows: deque[bytes] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.rows = deque(self.rows, maxlen=max(100, _MOST_BYTES // (8 * self.facts.row)))


class Recorder:
    """The recorder of this process; records between start() and stop().

    loaded_s: seconds, since the process began, of waiting for data.
    """

    def __init__(self) -> None:
        self.on = False
        self.loaded_s = 0.0
        self._lock = threading.Lock()
        self._plans: list[Rounds] = []
        self._loading_s = self._loaded = 0.0
        self._loaders = -1
        self._starting: list[Callable[[], object]] = []

    def when_on(self, watch: Callable[[], object]) -> None:
        """Call `watch` when recording starts for the first time: an adapter then begins to measure waits for data."""
        self._starting.append(watch)

    def start(self) -> None:
        """Begin a recording without rounds. Raises ValueError if one is on."""
        with self._lock:
            if self.on:
                raise ValueError("Profiling is already running in this process.")
            self._plans = []
            self._loading_s = 0.0
            self.on = True
        while self._starting:
            self._starting.pop()()

    def stop(self) -> None:
        """Stop; recorded rounds stay until take(). Waits for rounds that a device has under way."""
        READINGS.settle()
        self.on = False

    def loading(self, began: float, ended: float, loaders: int = -1) -> None:
        """Record that training waited for data between these times.

        loaders: number of loading processes; 0 if the training process loads, -1 if that is not known.
        """
        self._loading_s += ended - began
        self.loaded_s += ended - began
        self._loaded, self._loaders = ended, loaders

    def end_loading(self) -> tuple[float, float, int]:
        """The last three numbers of HEAD for a round that has ended now; the next round's waits begin."""
        with self._lock:
            loading = self._loading_s, self._loaded, self._loaders
            self._loading_s = 0.0
            return loading

    def add(
        self,
        facts: PlanFacts,
        number: int,
        finishing: float,
        ended: float,
        stamps: Sequence[float],
        loading: tuple[float, float, int],
    ) -> None:
        """Record a round. stamps: STAMPS of each bucket. loading: of end_loading() when the round ended."""
        with self._lock:
            self._append(facts, (number, finishing, ended, *loading, *stamps))

    def add_parts(
        self, facts: PlanFacts, number: int, ended: float, loading_s: float, seconds: Sequence[float]
    ) -> None:
        """Record a step on a mesh. seconds: of each of facts.parts."""
        with self._lock:
            self._append(facts, (number, ended, ended, loading_s, 0.0, self._loaders, *seconds))

    def _append(self, facts: PlanFacts, row: Sequence[float]) -> None:
        rounds = next((each for each in self._plans if each.facts is facts), None)
        if rounds is None:
            rounds = Rounds(facts)
            self._plans.append(rounds)
        rounds.rows.append(array("d", row).tobytes())

    def take(self) -> list[Rounds]:
        """Return the rounds recorded since the last take(), and forget them."""
        with self._lock:
            plans, self._plans = self._plans, []
        return plans


RECORDER = Recorder()
