"""Operations that come again and again, known to all ranks by number: who has announced which is counted, not compared.

Rank 0 gives a number to an operation that has become ready for the second time under the same name with the same
announcement, and says so in the answer. From then on ranks announce the number, and answers are numbers too.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hvdkit.engine.named.announcement import Announcement, Ready

_MOST = 4096  # operations with a number
_REMEMBERED = 4096  # operations that have been ready once

#: Kinds in which an announcement says all that there is to say: no rows of the rank's own.
_KINDS = frozenset({"allreduce", "broadcast", "barrier", "reducescatter"})

Numbers = NDArray[np.int32]


class Directory:
    """The numbers, on any rank."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._readies: list[Ready] = []

    def __len__(self) -> int:
        return len(self._readies)

    def __getitem__(self, number: int) -> Ready:
        return self._readies[number]

    def add(self, ready: Ready) -> None:
        """The next number is that of this operation."""
        self._numbers[ready.name] = len(self._readies)
        self._readies.append(ready)

    def find(self, name: str, asked: Announcement) -> int:
        """The number of an operation; -1 if it has none."""
        number = self._numbers.get(name, -1)
        return number if number >= 0 and self._readies[number].asked == asked else -1

    def has_name(self, name: str) -> bool:
        """Has an operation of this name a number?"""
        return name in self._numbers

    def number(self, name: str) -> int:
        """The number of the operation of this name, which has one."""
        return self._numbers[name]


class RollCall:
    """Which of so many parts of the ranks (of one rank each, in a small world) have announced which numbers.

    directory: of this rank's, if another one gives the numbers.
    """

    def __init__(self, parts: int, directory: Directory | None = None) -> None:
        self.directory = Directory() if directory is None else directory
        self._here = np.zeros((parts, _MOST), bool)
        self._count = np.zeros(_MOST, np.int32)  # parts that are here
        self._since_s = np.zeros(_MOST)
        self._once: dict[str, Announcement] = {}

    def number_for(self, ready: Ready) -> int:
        """The number that an operation gets now, having become ready; -1 if it gets none."""
        name, asked = ready.name, ready.asked
        if asked.kind not in _KINDS or ready.joined or ready.lane or self.directory.has_name(name):
            return -1
        if self._once.pop(name, None) == asked and len(self.directory) < _MOST:
            self.directory.add(Ready(name, asked))
            return len(self.directory) - 1
        self._once[name] = asked
        if len(self._once) > _REMEMBERED:
            del self._once[next(iter(self._once))]
        return -1

    def announce(self, part: int, numbers: Numbers, now_s: float) -> Numbers:
        """A part announces these numbers, each once; returns those that all parts have announced now."""
        before = self._count[numbers]
        self._since_s[numbers[before == 0]] = now_s
        self._here[part, numbers] = True
        self._count[numbers] = before + 1
        ready: Numbers = numbers[before + 1 == len(self._here)]
        self._forget(ready)
        return ready

    def _forget(self, numbers: Numbers | int) -> None:
        self._here[:, numbers] = False
        self._count[numbers] = 0

    def take(self, name: str) -> tuple[list[int], float]:
        """Forget who has announced the operation of this name; returns the parts that have, and since when one has."""
        if not self.directory.has_name(name):
            return [], 0.0
        number = self.directory.number(name)
        parts: list[int] = np.flatnonzero(self._here[:, number]).tolist()
        self._forget(number)
        return parts, float(self._since_s[number])

    def names(self, before_s: float = math.inf) -> list[str]:
        """The operations that some parts have announced, the first of them before that time."""
        waiting = (self._count > 0) & (self._since_s < before_s)
        return [self.directory[number].name for number in np.flatnonzero(waiting).tolist()]
