"""What is ready everywhere? The books of one rank, to which the others announce what they have; no input or output.

Ranks announce operations by name, in any order. An operation is ready when every rank that has not joined has announced
it; what the announcements disagree about makes it fail on every rank instead. Answers come in one order for all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hvdkit.engine.announcement import Announcement, Ready, Shape
from hvdkit.engine.roll_call import Numbers, RollCall

#: The name under which join() fails.
JOIN = "join"

#: Kinds of operations that ranks which have joined take part in, with zeros or as onlookers.
_WITH_JOINED = frozenset({"allreduce", "barrier", "plan", "sparse_gradients", "gradients"})


@dataclass(frozen=True)
class Failed:
    """It cannot be done, on any rank. name: of the operation; "" for all of them."""

    name: str
    why: str


@dataclass(frozen=True)
class Many:
    """Operations with numbers, see roll_call.py, that all ranks have: do them now."""

    numbers: Numbers


@dataclass(frozen=True)
class AllJoined:
    """Every rank has joined; they are all free again. last: the one that came last."""

    last: int


Answer = Ready | Many | Failed | AllJoined


@dataclass
class _Pending:
    """An operation that some ranks have announced."""

    since_s: float
    announced: dict[int, Announcement] = field(default_factory=dict)
    lanes: dict[int, int] = field(default_factory=dict)
    lane: int = 0


@dataclass(frozen=True)
class Waiting:
    """An operation that has been waiting for some ranks. seconds: since its first announcement."""

    name: str
    kind: str
    seconds: float
    present: tuple[int, ...]
    missing: tuple[int, ...]


class Coordinator:
    """Knows what each of `size` ranks has announced.

    who: names a rank for messages, e.g. "rank 3 (host n1)".
    """

    def __init__(self, size: int, who: Callable[[int], str]) -> None:
        self._size, self._who = size, who
        self._pending: dict[str, _Pending] = {}
        self._joined: list[int] = []
        self._left: dict[int, str] = {}
        self._answers: list[Answer] = []
        self._met = 0
        self._roll = RollCall(size)

    def announce(self, rank: int, name: str, asked: Announcement, now_s: float, lane: int = 0) -> None:
        """Take note of a rank's wish. lane: the position after that at which it has shown the operation in vain."""
        if 0 < lane <= self._met:
            return  # not in vain: it is going to take its announcement back
        pending = self._one_by_one(name) or self._pending.setdefault(name, _Pending(now_s))
        pending.announced[rank] = asked
        if lane:
            pending.lanes[rank] = lane
            pending.lane = max(pending.lane, lane)
        self._settle(name)

    def announce_many(self, rank: int, numbers: Numbers, now_s: float) -> None:
        """Take note of a rank's wish for operations with numbers."""
        known = self._roll.directory
        if self._joined or self._left or any(known.has_name(name) for name in self._pending):
            for number in numbers.tolist():
                self.announce(rank, known[number].name, known[number].asked, now_s)
            return
        ready = self._roll.announce(rank, numbers, now_s)
        if ready.size:
            self._answers.append(Many(ready))

    def _one_by_one(self, name: str) -> _Pending | None:
        """Look at an operation with a number as at one without; None if no rank has announced it by number."""
        ranks, since_s = self._roll.take(name)
        if not ranks:
            return None
        pending = self._pending.setdefault(name, _Pending(since_s))
        known = self._roll.directory
        pending.announced.update(dict.fromkeys(ranks, known[known.number(name)].asked))
        return pending

    def _all_one_by_one(self) -> None:
        for name in self._roll.names():
            self._one_by_one(name)

    def withdraw(self, rank: int, name: str) -> None:
        """The rank does not wait for the operation any more."""
        pending = self._pending.get(name)
        if pending is not None and pending.announced.pop(rank, None) is not None and not pending.announced:
            del self._pending[name]

    def met_before(self, lane: int) -> None:
        """All ranks have met at the position before this one: who has announced what it has shown there takes it back.

        So what others announce now under the same name is another operation.
        """
        if lane <= self._met:
            return
        self._met = lane
        for name, pending in list(self._pending.items()):
            for rank in [rank for rank, at in pending.lanes.items() if at <= lane]:
                self.withdraw(rank, name)
                del pending.lanes[rank]

    def join(self, rank: int) -> None:
        """The rank has no more work of its own; it takes part in the others' with zeros until all have joined."""
        self._all_one_by_one()
        self._joined.append(rank)
        self._fail_join()
        for name in list(self._pending):
            self._settle(name)
        if len(self._joined) == self._size:
            self._answers.append(AllJoined(self._joined[-1]))
            self._joined = []

    def leave(self, rank: int, why: str) -> None:
        """The rank will never announce anything again: what waits for it fails, now and later."""
        self._all_one_by_one()
        self._left[rank] = why
        for name in list(self._pending):
            self._settle(name)
        self._fail_join()

    def _fail_join(self) -> None:
        """Not all can join any more, if one has left that has not."""
        gone = [why for rank, why in self._left.items() if rank not in self._joined]
        if self._joined and gone:
            self._answers.append(Failed(JOIN, f"{gone[0]}; join() waits for it on {self._list(sorted(self._joined))}."))

    def give_up(self, name: str, why: str) -> None:
        """Let an operation fail that has waited too long."""
        if self._pending.pop(name, None) is not None:
            self._answers.append(Failed(name, why))

    def take_answers(self) -> list[Answer]:
        """What has become ready, or has failed, since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def waiting(self, now_s: float) -> list[Waiting]:
        """What is not ready."""
        self._all_one_by_one()
        everyone = set(range(self._size))
        return [
            Waiting(
                name,
                next(iter(pending.announced.values())).kind,
                now_s - pending.since_s,
                tuple(sorted(pending.announced)),
                tuple(sorted(everyone - set(pending.announced) - set(self._joined))),
            )
            for name, pending in self._pending.items()
        ]

    def _settle(self, name: str) -> None:
        pending = self._pending[name]
        announced = pending.announced
        if len(announced) + len(self._joined) < self._size and not self._left:
            return  # most calls end here, so soon
        missing = [rank for rank in range(self._size) if rank not in announced and rank not in self._joined]
        gone = [rank for rank in missing if rank in self._left]
        if gone:
            why = f"{self._left[gone[0]]}; {name} waits for it on {self._list(sorted(announced))}."
            self._answers.append(Failed(name, why))
        elif not missing:
            answer = agree(name, announced, self._size, tuple(self._joined), self._who)
            if isinstance(answer, Ready):
                answer = answer._replace(lane=pending.lane)
                answer = answer._replace(number=self._roll.number_for(answer))
            self._answers.append(answer)
        else:
            return
        del self._pending[name]

    def _list(self, ranks: Sequence[int]) -> str:
        return ", ".join(self._who(rank) for rank in ranks)


def agree(
    name: str, announced: dict[int, Announcement], size: int, joined: tuple[int, ...], who: Callable[[int], str]
) -> Ready | Failed:
    """Compare what the ranks announced for one operation.

    announced: by rank; ranks that have joined may be missing.
    """
    joined = tuple(rank for rank in joined if rank not in announced)
    ranks = sorted(announced)
    first = announced[ranks[0]]
    for rank in ranks[1:]:
        difference = _difference(first, announced[rank])
        if difference:
            what, here, there = difference
            return Failed(
                name,
                f"{name}: the ranks disagree about the {what}: {who(ranks[0])} has {here}, {who(rank)} has "
                f"{there}. Call it with the same {what} on every rank.",
            )
    if joined and first.kind not in _WITH_JOINED:
        return Failed(
            name,
            f"{name}: {who(joined[0])} has joined, and takes part in allreduces and optimizer steps only: it has "
            f"nothing to give to {first.kind}. Do that before join(), or after all ranks have joined.",
        )
    rows: tuple[tuple[int, ...], ...] = ()
    if first.kind == "allgather":
        rows = tuple(tuple(shape[0] for _, shape in announced[rank].tensors) for rank in range(size))
    elif first.kind == "alltoall":
        rows = tuple(announced[rank].splits for rank in range(size))
    return Ready(name, first, rows, joined)


def _difference(one: Announcement, other: Announcement) -> tuple[str, str, str] | None:
    """What two ranks' announcements of an operation must not differ in and do: (what, here, there)."""
    if one == other:
        return None
    if one.kind != other.kind:
        return "operation", one.kind, other.kind
    if len(one.tensors) != len(other.tensors):
        return "number of tensors", str(len(one.tensors)), str(len(other.tensors))
    for (dtype, shape), (other_dtype, other_shape) in zip(one.tensors, other.tensors, strict=True):
        if dtype != other_dtype:
            return "dtype", dtype, other_dtype
        if one.kind in ("allgather", "alltoall"):
            if shape[1:] != other_shape[1:] or len(shape) != len(other_shape):
                return "shape beyond the first dimension", str(list(shape)), str(list(other_shape))
        elif shape != other_shape:
            return "shape", str(list(shape)), str(list(other_shape))
    for (word, value), (_, other_value) in zip(one.options, other.options, strict=False):
        if value != other_value:
            return word, value, other_value
    return None


def elements(shape: Shape) -> int:
    """How many elements a tensor of this shape has."""
    return math.prod(shape)
