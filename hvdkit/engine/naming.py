"""Names of a group's ranks and operations, and the messages that all engines have about them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hvdkit.errors import DuplicateNameError

#: In the names of operations without one, before their number.
UNNAMED = ".noname."
#: What steps that have no name are counted as.
STEP = "step"
SHUT_DOWN = "hvdkit was shut down, or the process set was removed. Call hvd.init() or add_process_set() again."


class Naming:
    """What every engine calls its ranks and operations; see Engine.

    hosts: of each rank, "" where that is not known. ranks: of each rank, its number in the world. job_ranks: see World.
    """

    most_names = 0  # that operations without one take in turns; 0 for a new one each time

    def __init__(self, hosts: Sequence[str], ranks: Sequence[int], job_ranks: Sequence[int] | None = None) -> None:
        self.ranks = list(ranks)
        self._hosts, self._job_ranks = hosts, job_ranks
        self._counters: dict[str, int] = {}
        self._counting = threading.Lock()

    def who(self, rank: int) -> str:
        """Name a rank of this engine for a message."""
        places = [f"job rank {self._job_ranks[rank]}"] if self._job_ranks else []
        places += [f"host {self._hosts[rank]}"] if self._hosts[rank] else []
        return f"rank {self.ranks[rank]}" + (f" ({', '.join(places)})" if places else "")

    def duplicate(self, name: str, rank: int) -> DuplicateNameError:
        """The error of an operation whose name another one on this rank still has."""
        return DuplicateNameError(
            f"{name} is still running on {self.who(rank)}. Give operations that run at the same time different "
            "names, or call synchronize() on the first one before."
        )

    def make_name(self, kind: str) -> str:
        """A name for an operation without one: the n-th of its kind here and so on every rank."""
        number = self.count(kind + UNNAMED)
        return f"{kind}{UNNAMED}{number % self.most_names if self.most_names else number}"

    def count(self, kind: str) -> int:
        """How many of a kind there have been with this one, from 1; the same on every rank where the order is."""
        with self._counting:
            number = self._counters[kind] = self._counters.get(kind, 0) + 1
        return number

    def count_anew(self) -> None:
        """Count operations and steps without names from 1 again, where all ranks have come to the end of theirs."""
        with self._counting:
            for kind in [kind for kind in self._counters if kind == STEP or kind.endswith(UNNAMED)]:
                del self._counters[kind]
