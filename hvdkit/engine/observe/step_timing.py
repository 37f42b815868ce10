"""How the rounds of one plan go on this rank: how long training waits in each, and all times while it is profiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hvdkit.engine.observe.recording import RECORDER, STAMPS, PlanFacts, clock

_ROUNDS = 50  # of a window
_RANKS = 64  # of larger groups the windows are longer, so that their first rank has no more to read

_FILLING, _READY, _HANDED, _WAITING, _REDUCED, _TAKEN = range(len(STAMPS))


@dataclass(frozen=True)
class Window:
    """Some rounds of a plan on one rank. waited_s, round_s: medians of a round's wait, and of its whole time."""

    plan: str
    first: int
    last: int
    waited_s: float
    round_s: float


class Pace:
    """Of one plan. facts: of the plan. tell: takes each window to where those of all ranks are compared."""

    def __init__(self, facts: PlanFacts, tell: Callable[[Window], None]) -> None:
        self._facts, self._tell = facts, tell
        self._length = _ROUNDS * -(-len(facts.ranks) // _RANKS)
        self._waits: list[float] = []
        self._whole: list[float] = []
        self._ended = 0.0
        self._finishing = 0.0
        self._stamps: list[float] | None = None
        self.begin()

    def begin(self) -> None:
        """A round begins."""
        self._waited_s = self._began_s = 0.0
        self._stamps = [0.0] * (len(STAMPS) * len(self._facts.nbytes)) if RECORDER.on else None

    def _stamp(self, bucket: int, what: int) -> None:
        if self._stamps is not None:
            self._stamps[len(STAMPS) * bucket + what] = clock()

    def filling(self, bucket: int) -> None:
        """Gradients begin to be copied into the bucket."""
        self._stamp(bucket, _FILLING)

    def ready(self, bucket: int) -> None:
        """They are in it."""
        self._stamp(bucket, _READY)

    def handed(self, bucket: int) -> None:
        """It is under way."""
        self._stamp(bucket, _HANDED)

    def waiting(self, bucket: int) -> None:
        """Training has to have it, and looks whether it is reduced."""
        self._began_s = clock()
        if self._stamps is not None:
            self._stamps[len(STAMPS) * bucket + _WAITING] = self._began_s

    def reduced(self, bucket: int) -> None:
        """It is."""
        now = clock()
        self._waited_s += now - self._began_s
        if self._stamps is not None:
            self._stamps[len(STAMPS) * bucket + _REDUCED] = now

    def taken(self, bucket: int) -> None:
        """Its results have been copied back."""
        self._stamp(bucket, _TAKEN)

    def finishing(self) -> None:
        """All gradients are there; what is left is waited for."""
        self._finishing = clock()

    def ended(self, number: int) -> None:
        """The round of this number, the same on all ranks, is over, and the next begins."""
        now = clock()
        if self._stamps is not None:
            RECORDER.add(self._facts, number, self._finishing, now, self._stamps)
        if self._ended:
            self._waits.append(self._waited_s)
            self._whole.append(now - self._ended)
        self._ended = now
        if (number + 1) % self._length == 0 and self._waits and len(self._facts.ranks) > 1:
            waited, whole = median(self._waits), median(self._whole)
            self._tell(Window(self._facts.name, number + 1 - len(self._waits), number, waited, whole))
            self._waits, self._whole = [], []
        self.begin()


def median(values: Iterable[float]) -> float:
    """The middle one, or the higher of two. Python's statistics take long to import, and every job would."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
