"""The recorder of a profiled rank: times of each bucket's stages, and of waits for data.

Times are of CLOCK_MONOTONIC, which all processes of a host share.
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

#: The first numbers of a round's row: its number; the time when backward ended; the time when all results were in the
#: tensors; the seconds of waiting for data since the last round; the time when the last of these waits ended; the
#: number of loading processes (-1: unknown).
HEAD = ("round", "finishing", "ended", "loading_s", "loaded", "loaders")

#: Times of each bucket: filling begins; filling has ended; the transport has started it; training begins to wait for it
#: (the next time if it does not wait); training finds it reduced; draining has ended. See observer.py.
STAMPS = ("filling", "ready", "handed", "waiting", "reduced", "taken")

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MOST_BYTES = 8 << 20  # limit on the rows of a plan's last rounds

clock = time.monotonic


@dataclass(frozen=True)
class RankFacts:
    """The rank of a recording.

    rank: number of the rank.
    size: number of ranks.
    host: name of its host.
    node: equal for ranks that share a clock.
    transport: name of its transport.
    cores: number of cores that this rank has.
    fusion_bytes: the setting.
    link: (latency_s, byte_s, message_s) between hosts; None if not measured. See transport.between.select.Link.
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
    """Return a name for the running kernel: the host's name, with the kernel's boot id if available."""
    try:
        return f"{host} {_BOOT.read_text().strip()}"
    except OSError:
        return host


@dataclass(frozen=True)
class PlanFacts:
    """The plan of a recording.

    name: of the plan.
    ranks: of its group, as numbers in the world.
    nbytes: bytes of each bucket in memory.
    wire_bytes: bytes of each bucket between hosts.
    names: the first tensors of each bucket.
    threaded: Does a progress thread drive it?
    parts: for steps on a mesh, which have no buckets: the meaning of the seconds in a row, see torch/parallel/meter.py.
    pipeline: for steps on a mesh: ranks of the pipeline, stages of each rank, and micro-batches; () without a pipeline.
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
        """The number of values in a round's row."""
        if self.parts:
            return len(HEAD) + len(self.parts)
        return len(HEAD) + len(STAMPS) * len(self.nbytes)


@dataclass
class Rounds:
    """The last rounds of a plan. rows: one a round: HEAD, then STAMPS of each bucket, as bytes of float64."""

    facts: PlanFacts
    rows: deque[bytes] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.rows = deque(self.rows, maxlen=max(100, _MOST_BYTES // (8 * self.facts.row)))


class Recorder:
    """The recorder of this process; records between start() and stop().

    on: Does it record? loaded_s: seconds of waiting for data since the process began.
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
        """Call `watch` when recording first starts, so that an adapter begins to measure waits for data."""
        self._starting.append(watch)

    def start(self) -> None:
        """Begin an empty recording. Raises ValueError if a recording is under way."""
        with self._lock:
            if self.on:
                raise ValueError("Profiling is already running in this process.")
            self._plans = []
            self._loading_s = 0.0
            self.on = True
        while self._starting:
            self._starting.pop()()

    def stop(self) -> None:
        """Stop recording; recorded rounds stay until take(). Waits for rounds that are under way on a device."""
        READINGS.read_pending()
        self.on = False

    def loading(self, began: float, ended: float, loaders: int = -1) -> None:
        """Record that training waited for data between these times.

        loaders: number of loading processes; 0 if the training process loads, -1 if unknown.
        """
        self._loading_s += ended - began
        self.loaded_s += ended - began
        self._loaded, self._loaders = ended, loaders

    def end_loading(self) -> tuple[float, float, int]:
        """Return the last three numbers of HEAD for a round that ends now, and restart the sum of waits."""
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
        """Record a round.

        facts: the plan.
        number: of the round.
        finishing: time when backward ended.
        ended: time when the round ended.
        stamps: STAMPS of each bucket.
        loading: the result of end_loading() when the round ended.
        """
        with self._lock:
            self._append(facts, (number, finishing, ended, *loading, *stamps))

    def add_parts(
        self, facts: PlanFacts, number: int, ended: float, loading_s: float, seconds: Sequence[float]
    ) -> None:
        """Record a step on a mesh.

        facts: the plan.
        number: of the step.
        ended: time when the step ended.
        loading_s: seconds of waiting for data.
        seconds: for each of facts.parts.
        """
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
