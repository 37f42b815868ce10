"""Names of a group's ranks for messages, and of its operations that the user has given none."""

from __future__ import annotations

import threading
from collections.abc import Sequence


class Naming:
    """What every engine calls its ranks and operations; see Engine.

    hosts: of each rank, "" where that is not known. ranks: of each rank, its number in the world. job_ranks: see World.
    """

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

    def make_name(self, kind: str) -> str:
        """A name for an operation without one: the n-th of its kind here and so on every rank."""
        return f"{kind}.noname.{self.count(kind)}"

    def count(self, kind: str) -> int:
        """How many of a kind there have been with this one, from 1; the same on every rank where the order is."""
        with self._counting:
            number = self._counters[kind] = self._counters.get(kind, 0) + 1
        return number
