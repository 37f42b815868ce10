"""What a part of the ranks has: gathered by the one that speaks for them, and passed on once all of them have it.

So a rank further up hears of an operation once from each part, however many ranks are in it. What only some of a part
have is passed on too, but after a while: then somebody is late, or missing, and has to be known by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdkit.engine.named.announcement import Announcement, Ready
from hvdkit.engine.named.coordinator import Answer, Failed, Many
from hvdkit.engine.named.operation_ids import Directory, Numbers, RollCall

#: How long an operation that only some of the part have is kept here, in seconds.
HOLD_S = 0.05

#: What has been gathered of an operation: its name, what some ranks say of it, and which.
Gathered = tuple[str, Announcement, int]

JOINING = Announcement("join", ())
WITHDRAWING = Announcement("withdraw", ())


@dataclass
class _Held:
    """An operation of which nothing, or no more, has been passed on."""

    since_s: float
    announced: dict[Announcement, int] = field(default_factory=dict)
    here: int = 0


class Collector:
    """The books of a rank that speaks for others. Sets of ranks are numbers, see tree.py.

    parts: its own set, and that of each child. directory: of this rank.
    """

    def __init__(self, parts: Sequence[int], directory: Directory) -> None:
        self._parts = list(parts)
        self._everyone = sum(parts)
        self._directory = directory
        self._roll = RollCall(len(self._parts), directory)
        self._held: dict[str, _Held] = {}
        self._passed: dict[str, int] = {}  # ranks that are known further up, of operations that others lack
        self._joined = 0
        self._joining, self._joining_since_s = 0, math.inf
        self._next_look_s = 0.0
        self._items: list[Gathered] = []
        self._numbers: list[Numbers] = []

    def announce(self, ranks: int, name: str, asked: Announcement, now_s: float, lane: int = 0) -> None:
        """Take note of the wish of some ranks. lane: 0, as ranks that have one all announce to the root."""
        assert not lane
        held = self._one_by_one(name) or self._held.setdefault(name, _Held(now_s))
        held.announced[asked] = held.announced.get(asked, 0) | ranks
        held.here |= ranks
        self._settle(name)

    def announce_many(self, part: int, numbers: Numbers, now_s: float) -> None:
        """Take note of the wish of a part for operations with numbers. part: its index."""
        known = self._directory
        if self._joined or any(known.has_name(name) for name in (*self._held, *self._passed)):
            for number in numbers.tolist():
                self.announce(self._parts[part], known[number].name, known[number].asked, now_s)
            return
        ready = self._roll.announce(part, numbers, now_s)
        if ready.size:
            self._numbers.append(ready)

    def withdraw(self, ranks: int, name: str) -> None:
        """These ranks do not wait for the operation any more."""
        held = self._one_by_one(name) or self._held.get(name)
        if held is not None:
            known, ranks = held.here & ranks, ranks & ~held.here
            held.announced = {asked: rest for asked, those in held.announced.items() if (rest := those & ~known)}
            held.here &= ~known
            if not held.here:
                del self._held[name]
        if ranks:
            self._items.append((name, WITHDRAWING, ranks))
            self._note_passed(name, self._passed.get(name, 0) & ~ranks)

    def join(self, ranks: int) -> None:
        """These ranks have no more work of their own."""
        self._joined |= ranks
        self._joining |= ranks
        for name in self._roll.names():
            self._one_by_one(name)
        for name in list(self._held):
            self._settle(name)

    def answered(self, answer: Answer) -> None:
        """Further up it has been settled: what is announced from now on is new."""
        if isinstance(answer, Many):
            if self._passed:
                for number in answer.numbers.tolist():
                    self._passed.pop(self._directory[number].name, None)
        elif isinstance(answer, Ready | Failed):
            self._passed.pop(answer.name, None)
        else:
            self._joined = 0

    def take(self, now_s: float, *, all_of_it: bool = False) -> tuple[list[Numbers], list[Gathered]]:
        """What is to be passed on now. all_of_it: even what only some ranks have."""
        before_s = math.inf if all_of_it else now_s - HOLD_S
        if self._joining:
            self._joining_since_s = min(self._joining_since_s, now_s)
        joins = self._joining and (self._joining_since_s < before_s or self._joined == self._everyone)
        if joins or all_of_it or now_s >= self._next_look_s:
            self._next_look_s = now_s + HOLD_S / 4
            for name in self._roll.names(before_s):
                self._one_by_one(name)
            for name in [name for name, held in self._held.items() if held.since_s < before_s]:
                self._pass_on(name)
        if joins:  # after what these ranks have announced before, which has been held for longer
            self._items.append(("", JOINING, self._joining))
            self._joining, self._joining_since_s = 0, math.inf
        numbers, self._numbers = self._numbers, []
        items, self._items = self._items, []
        return numbers, items

    def _one_by_one(self, name: str) -> _Held | None:
        """Look at an operation with a number as at one without; None if no part has announced it by number."""
        parts, since_s = self._roll.take(name)
        if not parts:
            return None
        held = self._held.setdefault(name, _Held(since_s))
        asked = self._directory[self._directory.number(name)].asked
        for part in parts:
            held.announced[asked] = held.announced.get(asked, 0) | self._parts[part]
            held.here |= self._parts[part]
        return held

    def _settle(self, name: str) -> None:
        if self._held[name].here | self._passed.get(name, 0) | self._joined == self._everyone:
            self._pass_on(name)

    def _pass_on(self, name: str) -> None:
        held = self._held.pop(name)
        self._items += [(name, asked, ranks) for asked, ranks in held.announced.items()]
        self._note_passed(name, self._passed.get(name, 0) | held.here)

    def _note_passed(self, name: str, ranks: int) -> None:
        if ranks and ranks | self._joined != self._everyone:
            self._passed[name] = ranks
        else:
            self._passed.pop(name, None)
