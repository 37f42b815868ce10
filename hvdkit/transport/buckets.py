"""Buckets whose reduction is a sequence of steps, driven by whoever has time: a thread or the training loop itself."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from hvdkit.transport.base import Buffer, Elsewhere
from hvdkit.transport.waiting import Waiting, calls


class SteppedBuckets(ABC):
    """The common part of all Buckets: which reductions are under way, and stepping them.

    A transport writes `steps(index, elsewhere)`, a generator that does one bucket's reduction and yields wherever it
    would have to wait: False while later buckets must not overtake it (collectives are posted in the same order on all
    ranks), True once they may. Any thread may call; a lock keeps steps apart.

    check: called now and then while waiting; raises RankLostError if a peer has ended.
    """

    depth: int
    sent_bytes: int = 0
    memory: Sequence[Buffer]
    own: Sequence[tuple[int, int]]

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._running: dict[int, Iterator[bool]] = {}  # in start order
        self._lock = threading.RLock()
        self._failure: BaseException | None = None

    @abstractmethod
    def steps(self, index: int, elsewhere: Sequence[Elsewhere]) -> Iterator[bool]:
        """Reduce memory[index] in place, but for what stands elsewhere."""

    def start(self, index: int, elsewhere: Sequence[Elsewhere] = ()) -> None:
        """See Buckets.start."""
        calls().begun += 1
        with self._lock:
            self._running[index] = self.steps(index, elsewhere)
            self.advance()

    def advance(self) -> bool:
        """See Buckets.advance."""
        moved = False
        with self._lock:
            if self._failure is not None:
                raise self._failure
            for index, steps in list(self._running.items()):
                try:
                    overtaking = next(steps)
                except StopIteration:
                    del self._running[index]
                    moved = True
                    continue
                except BaseException as error:
                    calls().uncertain = True
                    self._failure = error  # met by the progress thread, say: every later call tells of it
                    raise
                if not overtaking:
                    break
        return moved

    def finished(self, index: int) -> bool:
        """See Buckets.finished."""
        return index not in self._running

    @property
    def busy(self) -> bool:
        """See Buckets.busy."""
        return bool(self._running)

    def wait(self, index: int, watch: Callable[[], None] | None = None) -> None:
        """See Buckets.wait."""

        def check() -> None:
            self._check()
            if watch is not None:
                watch()

        waiting = Waiting(check)
        while index in self._running:
            if not self.advance():
                waiting.pause()

    def close(self) -> None:
        """See Buckets.close."""
        self._running.clear()
