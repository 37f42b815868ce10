"""What is ready everywhere? The books of one rank, to which the others announce what they have; no input or output.

Ranks announce operations by name, in any order. An operation is ready when every rank that has not joined has announced
it; what the announcements disagree about makes it fail on every rank instead. Answers come in one order for all ranks.

Ranks that announce the same are one set (tree.py), so what there is to do grows with what they differ in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hvdkit.engine.named.announcement import Announcement, Ready, Shape
from hvdkit.engine.named.operation_ids import Numbers, RollCall
from hvdkit.engine.named.tree import first_in, ranks_in, run_of

#: The name under which join() fails.
JOIN = "join"

#: Kinds of operations that ranks which have joined take part in, with zeros or as onlookers.
_WITH_JOINED = frozenset({"allreduce", "barrier", "plan", "sparse_gradients", "gradients", "tune"})


@dataclass(frozen=True)
class Failed:
    """It cannot be done, on any rank.

    name: of the operation; "" for all of them. disagree: as the ranks have announced what does not go together.
    """

    name: str
    why: str
    disagree: bool = False


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
    """An operation that some ranks have announced. announced: the ranks that have said so, by what they said."""

    since_s: float
    announced: dict[Announcement, int] = field(default_factory=dict)
    lanes: dict[int, int] = field(default_factory=dict)
    lane: int = 0
    here: int = 0

    def add(self, ranks: int, asked: Announcement) -> None:
        """These ranks, which have not announced it, do."""
        self.announced[asked] = self.announced.get(asked, 0) | ranks
        self.here |= ranks

    def remove(self, ranks: int) -> None:
        """These ranks have not announced it."""
        self.announced = {asked: rest for asked, those in self.announced.items() if (rest := those & ~ranks)}
        self.here &= ~ranks


@dataclass(frozen=True)
class Waiting:
    """An operation that has been waiting for some ranks. seconds: since its first announcement."""

    name: str
    kind: str
    seconds: float
    here: int
    lacking: int

    @property
    def present(self) -> tuple[int, ...]:
        """The ranks that have announced it."""
        return tuple(ranks_in(self.here))

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have not, and have not joined."""
        return tuple(ranks_in(self.lacking))


class Coordinator:
    """Knows what each of `size` ranks has announced. Sets of ranks are numbers, see tree.py.

    who: names a rank for messages, e.g. "rank 3 (host n1)". parts: sets of ranks that announce numbers as one; each
    rank by itself if None.
    """

    def __init__(self, size: int, who: Callable[[int], str], parts: Sequence[int] | None = None) -> None:
        self._size, self._who = size, who
        self._everyone = run_of(0, size)
        self._parts = parts or [1 << rank for rank in range(size)]
        self._pending: dict[str, _Pending] = {}
        self._joined: list[int] = []  # in the order of coming
        self._joined_set = 0
        self._left: dict[int, str] = {}
        self._answers: list[Answer] = []
        self._met = 0
        self._roll = RollCall(len(self._parts))

    def announce(self, ranks: int, name: str, asked: Announcement, now_s: float, lane: int = 0) -> None:
        """Take note of the wish of some ranks.

        lane: of one rank, the position after that at which it has shown the operation in vain.
        """
        if 0 < lane <= self._met:
            return  # not in vain: it is going to take its announcement back
        pending = self._one_by_one(name) or self._pending.setdefault(name, _Pending(now_s))
        if pending.here & ranks:
            pending.remove(ranks)
        pending.add(ranks, asked)
        if lane:
            pending.lanes[ranks] = lane
            pending.lane = max(pending.lane, lane)
        self._settle(name)

    def announce_many(self, part: int, numbers: Numbers, now_s: float) -> None:
        """Take note of the wish of a part of the ranks for operations with numbers. part: its index."""
        known = self._roll.directory
        if self._joined or self._left or any(known.has_name(name) for name in self._pending):
            for number in numbers.tolist():
                self.announce(self._parts[part], known[number].name, known[number].asked, now_s)
            return
        ready = self._roll.announce(part, numbers, now_s)
        if ready.size:
            self._answers.append(Many(ready))

    def _one_by_one(self, name: str) -> _Pending | None:
        """Look at an operation with a number as at one without; None if no rank has announced it by number."""
        parts, since_s = self._roll.take(name)
        if not parts:
            return None
        pending = self._pending.setdefault(name, _Pending(since_s))
        known = self._roll.directory
        for part in parts:
            pending.add(self._parts[part], known[known.number(name)].asked)
        return pending

    def _all_one_by_one(self) -> None:
        for name in self._roll.names():
            self._one_by_one(name)

    def withdraw(self, ranks: int, name: str) -> None:
        """These ranks do not wait for the operation any more."""
        pending = self._pending.get(name)
        if pending is not None and pending.here & ranks:
            pending.remove(ranks)
            if not pending.here:
                del self._pending[name]

    def met_before(self, lane: int) -> None:
        """All ranks have met at the position before this one: who has announced what it has shown there takes it back.

        So what others announce now under the same name is another operation.
        """
        if lane <= self._met:
            return
        self._met = lane
        for name, pending in list(self._pending.items()):
            for ranks in [ranks for ranks, at in pending.lanes.items() if at <= lane]:
                self.withdraw(ranks, name)
                del pending.lanes[ranks]

    def join(self, ranks: int) -> None:
        """These ranks have no more work of their own, and take part in the others' with zeros until all have joined."""
        self._all_one_by_one()
        self._joined += ranks_in(ranks)
        self._joined_set |= ranks
        self._fail_join()
        for name in list(self._pending):
            self._settle(name)
        if len(self._joined) == self._size:
            self._answers.append(AllJoined(self._joined[-1]))
            self._joined, self._joined_set = [], 0

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
        return [
            Waiting(
                name,
                next(iter(pending.announced)).kind,
                now_s - pending.since_s,
                pending.here,
                self._everyone & ~(pending.here | self._joined_set),
            )
            for name, pending in self._pending.items()
        ]

    def _settle(self, name: str) -> None:
        pending = self._pending[name]
        missing = self._everyone & ~(pending.here | self._joined_set)
        gone = [rank for rank in sorted(self._left) if missing >> rank & 1]
        if gone:
            why = f"{self._left[gone[0]]}; {name} waits for it on {self._list(ranks_in(pending.here))}."
            self._answers.append(Failed(name, why))
        elif not missing:
            joined = tuple(rank for rank in self._joined if not pending.here >> rank & 1)
            answer = agree(name, pending.announced, self._size, joined, self._who)
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
    name: str, announced: dict[Announcement, int], size: int, joined: tuple[int, ...], who: Callable[[int], str]
) -> Ready | Failed:
    """Compare what the ranks announced for one operation.

    announced: the ranks that said so, by what they said. joined: the other ranks.
    """
    (first, those), *others = sorted(announced.items(), key=lambda one: first_in(one[1]))
    for other, ranks in others:
        difference = _difference(first, other)
        if difference:
            what, here, there = difference
            return Failed(
                name,
                f"{name}: the ranks disagree about the {what}: {who(first_in(those))} has {here}, "
                f"{who(first_in(ranks))} has {there}. Call it with the same {what} on every rank.",
                disagree=True,
            )
    if joined and first.kind not in _WITH_JOINED:
        return Failed(
            name,
            f"{name}: {who(joined[0])} has joined, and takes part in allreduces and optimizer steps only: it has "
            f"nothing to give to {first.kind}. Do that before join(), or after all ranks have joined.",
            disagree=True,
        )
    rows: list[tuple[int, ...]] = []
    if first.kind in ("allgather", "alltoall"):
        rows = [()] * size
        for asked, ranks in announced.items():
            for rank in ranks_in(ranks):
                rows[rank] = asked.splits if first.kind == "alltoall" else tuple(shape[0] for _, shape in asked.tensors)
    return Ready(name, first, tuple(rows), joined)


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
