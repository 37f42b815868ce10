"""Recordings as a job of known numbers would have made them: each rank computes, loads, and shares buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdkit.engine.observe.recording import HEAD, STAMPS, PlanFacts, RankFacts
from hvdkit.profiling.recordings import RankRecording

MS = 1e-3


def same(_rank: int, _step: int) -> float:
    """No more than the others, ever."""
    return 0.0


@dataclass(frozen=True)
class Job:
    """What each step of each rank is made of, in seconds.

    compute_s: of which the second half is backward, which fills one bucket after another. late: more compute, loading:
    waiting for data, both of (rank, step). bucket_s: what it takes to reduce one. hosts: of each rank; off_s: by how
    much a host's clock is ahead, and drift how much more each second. first: round that each rank has kept. cores: of
    each rank.
    """

    ranks: int = 4
    steps: int = 120
    compute_s: float = 10 * MS
    bucket_s: float = 1 * MS
    buckets: int = 4
    nbytes: int = 4 << 20
    late: Callable[[int, int], float] = same
    loading: Callable[[int, int], float] = same
    hosts: Sequence[str] = ()
    off_s: dict[str, float] = field(default_factory=dict)
    drift: float = 0.0
    loaders: int = 0
    threaded: bool = True
    cores: float = 2.0
    first: Sequence[int] = ()

    def host(self, rank: int) -> str:
        """Where the rank is."""
        return self.hosts[rank] if self.hosts else "n1"

    def record(self) -> list[RankRecording]:
        """What its ranks would have recorded."""
        facts = PlanFacts(
            "optimizer.1",
            tuple(range(self.ranks)),
            (self.nbytes,) * self.buckets,
            (self.nbytes,) * self.buckets,
            tuple(f"layer{at}" for at in range(self.buckets)),
            self.threaded,
        )
        rows = np.zeros((self.ranks, self.steps, facts.row))
        begin = 0.0
        for step in range(self.steps):
            begin = self._step(rows[:, step], step, begin)
        recordings = []
        for rank in range(self.ranks):
            times = rows[rank]
            times[:, 0] = np.arange(self.steps)
            times[:, 5] = self.loaders
            off = self.off_s.get(self.host(rank), 0.0)
            for column in (1, 2, 4, *range(len(HEAD), facts.row)):
                times[:, column] += off + self.drift * off * times[:, column]
            about = RankFacts(rank, self.ranks, self.host(rank), self.host(rank), "shared_memory", self.cores, 4 << 20)
            recordings.append(RankRecording(about, [(facts, times[self.first[rank] if self.first else 0 :])]))
        return recordings

    def _step(self, rows: np.typing.NDArray[np.float64], step: int, begin: float) -> float:
        """Fill in one step of all ranks; returns when it ends."""
        stamps = rows[:, len(HEAD) :].reshape(self.ranks, self.buckets, len(STAMPS))
        finishing = np.zeros(self.ranks)
        for rank in range(self.ranks):
            loading = self.loading(rank, step)
            forward = begin + loading + self.compute_s / 2 + self.late(rank, step)
            rows[rank, 3], rows[rank, 4] = loading, begin + loading
            stamps[rank, :, :3] = (forward + self.compute_s / 2 * (np.arange(self.buckets) + 1) / self.buckets)[:, None]
            finishing[rank] = stamps[rank, -1, 0]
        rows[:, 1] = finishing
        done = 0.0
        now = finishing.copy()
        for at in range(self.buckets):
            done = max(done, stamps[:, at, 1].max()) + self.bucket_s
            stamps[:, at, 3] = now
            now = np.maximum(now, done)
            stamps[:, at, 4] = stamps[:, at, 5] = now
        rows[:, 2] = now
        return float(now.max())
