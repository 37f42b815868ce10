"""What two ranks have said to each other once, they say by number from then on."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

_MOST = 1024  # things that get a number

T = TypeVar("T", bound=Hashable)


class Said(Generic[T]):
    """What this rank has said; to ranks that have all heard all of it."""

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}

    def say(self, thing: T) -> tuple[int, T | None]:
        """What to send for `thing`: its number, -1 for none, and the thing itself unless that says it all."""
        number = self._numbers.get(thing, -1)
        if number >= 0:
            return number, None
        if len(self._numbers) < _MOST:
            number = self._numbers[thing] = len(self._numbers)
        return number, thing


class Heard(Generic[T]):
    """What another rank has said to this one."""

    def __init__(self) -> None:
        self._things: list[T] = []

    def hear(self, number: int, thing: T | None) -> T:
        """What was meant by what say() gave; called for all of that, in order."""
        if thing is None:
            return self._things[number]
        if number >= 0:
            self._things.append(thing)
        return thing
