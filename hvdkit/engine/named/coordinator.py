"""The coordinator: rank 0's books of what all ranks have announced, and what is ready on all; no input or output.

Ranks announce operations in any order: by name, or by the number that an answer has given to the name. An operation is
ready when every rank that has not joined has announced it; what the announcements disagree about makes it fail on every
rank instead. Answers come in one order for all ranks. Sets of ranks are integers, bit r for rank r.

Invariants:
- A number stands for one name with one announcement, for ever, on all ranks: answers carry new numbers, in their order.
- What ranks have announced by number is in `_numbered`, all else in `_pending`; one operation is never in both. While a
  rank has joined or left `_numbered` is empty, so only `_pending` knows of joined and missing ranks.
- Nothing in `_pending` or `_numbered` is complete: what completes it takes it out, and appends its answer.
- A rank announces a name again only after its answer, which follows from the one order and from unique names on a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hvdkit.engine.named.operation import (
    JOIN,
    JOINING,
    WITHDRAWING,
    AllJoined,
    Announcement,
    Answer,
    Failed,
    Ready,
)

#: Kinds of operations that ranks which have joined take part in, with zeros or as onlookers.
_WITH_JOINED = frozenset({"allreduce", "barrier", "plan", "sparse_gradients", "gradients", "tune"})
#: Kinds in which an announcement has nothing of the rank's own, such as rows: these get numbers.
_NUMBERED = frozenset({"allreduce", "broadcast", "barrier", "reducescatter"})
_MOST_NUMBERS = 4096
_MOST_REMEMBERED = 4096  # operations that have been ready once

#: What a rank announces: a number, or a name with what is asked.
Item = int | tuple[str, Announcement]


class Numbers:
    """Operations that are known to all ranks by number; the same on all ranks where the answers have come as far."""

    def __init__(self) -> None:
        self.by_name: dict[str, tuple[Announcement, int]] = {}
        self.ready: list[Ready] = []  # by number, as they are done

    def add(self, name: str, asked: Announcement) -> int:
        """Give the next number to an operation."""
        self.by_name[name] = asked, len(self.ready)
        self.ready.append(Ready(name, asked))
        return len(self.ready) - 1

    def item(self, name: str, asked: Announcement) -> Item:
        """What to announce an operation by."""
        known = self.by_name.get(name)
        if known is None or (known[0] is not asked and known[0] != asked):
            return name, asked
        if known[0] is not asked:
            self.by_name[name] = asked, known[1]  # compared sooner the next time
        return known[1]


@dataclass
class _Pending:
    """An operation that some ranks have announced. announced: the ranks, by what they asked. here: all of them."""

    since_s: float
    announced: dict[Announcement, int] = field(default_factory=dict)
    here: int = 0

    def add(self, ranks: int, asked: Announcement) -> None:
        if self.here & ranks:
            self.remove(ranks)
        self.announced[asked] = self.announced.get(asked, 0) | ranks
        self.here |= ranks

    def remove(self, ranks: int) -> None:
        self.announced = {asked: rest for asked, those in self.announced.items() if (rest := those & ~ranks)}
        self.here &= ~ranks


class Waiting(NamedTuple):
    """An operation that has been waiting for some ranks. seconds: since its first announcement.

    present: the ranks that have announced it. missing: those that have not, and have not joined.
    """

    name: str
    kind: str
    seconds: float
    present: tuple[int, ...]
    missing: tuple[int, ...]


class Coordinator:
    """Knows what each of `size` ranks has announced.

    numbers: of rank 0; gets new ones here. who: names a rank for messages, e.g. "rank 3 (host n1)".
    """

    def __init__(self, size: int, who: Callable[[int], str], numbers: Numbers | None = None) -> None:
        self._size, self._who = size, who
        self._everyone = (1 << size) - 1
        self.numbers = Numbers() if numbers is None else numbers
        self.answers: list[Answer] = []  # whoever announces takes them out
        self._pending: dict[str, _Pending] = {}
        self._numbered: dict[int, tuple[int, float]] = {}  # number -> ranks, and since when
        self._once: dict[str, Announcement] = {}  # ready once, for a number the second time
        self._joined: list[int] = []  # in the order of coming
        self._joined_set = 0
        self._left: dict[int, str] = {}

    def announce(self, ranks: int, items: Sequence[Item], now_s: float) -> None:
        """Take note of what some ranks announce, in their order."""
        numbered, everyone, pendings, ready = self._numbered, self._everyone, self._pending, self.numbers.ready
        special = bool(self._joined or self._left)
        for item in items:
            if type(item) is int and not special and (not pendings or ready[item].name not in pendings):
                here, since_s = numbered.get(item) or (0, now_s)
                if here | ranks == everyone:
                    numbered.pop(item, None)
                    self.answers.append(item)
                else:
                    numbered[item] = here | ranks, since_s
                continue
            name, asked = ready[item][:2] if isinstance(item, int) else item
            if asked.kind == JOINING.kind:
                self._join(ranks)
                special = True
            elif asked.kind == WITHDRAWING.kind:
                self._withdraw(ranks, name)
            else:
                pending = self._by_name(name) or pendings.setdefault(name, _Pending(now_s))
                pending.add(ranks, asked)
                self._settle(name)

    def _by_name(self, name: str) -> _Pending | None:
        """Look at an operation that has been announced by number as at one by name; None if it has not been."""
        asked, number = self.numbers.by_name.get(name, (JOINING, -1))
        if number not in self._numbered:
            return None
        here, since_s = self._numbered.pop(number)
        pending = self._pending[name] = _Pending(since_s)
        pending.add(here, asked)
        return pending

    def _all_by_name(self) -> None:
        for number in list(self._numbered):
            self._by_name(self.numbers.ready[number].name)

    def _withdraw(self, ranks: int, name: str) -> None:
        pending = self._by_name(name) or self._pending.get(name)
        if pending is not None:
            pending.remove(ranks)
            if not pending.here:
                del self._pending[name]

    def _join(self, ranks: int) -> None:
        """These ranks have no more work of their own, and take part in the others' with zeros until all have joined."""
        self._all_by_name()
        self._joined += ranks_in(ranks)
        self._joined_set |= ranks
        self._fail_join()
        for name in list(self._pending):
            self._settle(name)
        if len(self._joined) == self._size:
            self.answers.append(AllJoined(self._joined[-1]))
            self._joined, self._joined_set = [], 0

    def leave(self, rank: int, why: str) -> None:
        """The rank will never announce anything again: what waits for it fails, now and later."""
        self._all_by_name()
        self._left[rank] = why
        for name in list(self._pending):
            self._settle(name)
        self._fail_join()

    def _fail_join(self) -> None:
        """Not all can join any more, if one has left that has not."""
        gone = [why for rank, why in self._left.items() if rank not in self._joined]
        if self._joined and gone:
            waiting = self._list(sorted(self._joined))
            why = f"{gone[0]}, but join() waits for it on {waiting}. Call join() on every rank."
            self.answers.append(Failed(JOIN, why))

    def give_up(self, name: str, why: str) -> None:
        """Let an operation fail that has waited too long."""
        if self._pending.pop(name, None) is not None:
            self.answers.append(Failed(name, why))

    def waiting(self, now_s: float) -> list[Waiting]:
        """What is not ready."""
        self._all_by_name()
        return [
            Waiting(
                name,
                next(iter(pending.announced)).kind,
                now_s - pending.since_s,
                tuple(ranks_in(pending.here)),
                tuple(ranks_in(self._everyone & ~(pending.here | self._joined_set))),
            )
            for name, pending in self._pending.items()
        ]

    def _settle(self, name: str) -> None:
        pending = self._pending[name]
        missing = self._everyone & ~(pending.here | self._joined_set)
        gone = [rank for rank in sorted(self._left) if missing >> rank & 1]
        if gone:
            why = (
                f"{self._left[gone[0]]}, but {name} waits for it on {self._list(ranks_in(pending.here))}. Call "
                "the same operations on every rank."
            )
            self.answers.append(Failed(name, why))
        elif not missing:
            joined = tuple(rank for rank in self._joined if not pending.here >> rank & 1)
            answer = agree(name, pending.announced, self._size, joined, self._who)
            self.answers.append(self._numbered_answer(answer) if isinstance(answer, Ready) else answer)
        else:
            return
        del self._pending[name]

    def _numbered_answer(self, ready: Ready) -> Ready:
        """The answer with a number for the operation, if it is ready for the second time under the same name."""
        name, asked = ready.name, ready.asked
        if asked.kind not in _NUMBERED or ready.joined or name in self.numbers.by_name:
            return ready
        if self._once.pop(name, None) == asked and len(self.numbers.ready) < _MOST_NUMBERS:
            return ready._replace(number=self.numbers.add(name, asked))
        self._once[name] = asked
        if len(self._once) > _MOST_REMEMBERED:
            del self._once[next(iter(self._once))]
        return ready

    def _list(self, ranks: Sequence[int]) -> str:
        return ", ".join(self._who(rank) for rank in ranks)


def agree(
    name: str, announced: dict[Announcement, int], size: int, joined: tuple[int, ...], who: Callable[[int], str]
) -> Ready | Failed:
    """Compare what the ranks announced for one operation.

    announced: the ranks that said so, by what they said. joined: the other ranks.
    """
    (first, those), *others = sorted(announced.items(), key=lambda each: _first_in(each[1]))
    for other, ranks in others:
        difference = _difference(first, other)
        if difference:
            what, here, there = difference
            return Failed(
                name,
                f"{name}: the ranks disagree about the {what}: {who(_first_in(those))} has {here}, "
                f"{who(_first_in(ranks))} has {there}. Call it with the same {what} on every rank.",
                disagree=True,
            )
    if joined and first.kind not in _WITH_JOINED:
        return Failed(
            name,
            f"{name}: {who(joined[0])} has joined, and a joined rank contributes to allreduces and optimizer steps "
            f"only, not to {first.kind}. Call {first.kind} before join(), or after all ranks have joined.",
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
    if one.kind != other.kind:
        return "operation", one.kind, other.kind
    if len(one.tensors) != len(other.tensors):
        return "number of tensors", str(len(one.tensors)), str(len(other.tensors))
    for (dtype, shape), (other_dtype, other_shape) in zip(one.tensors, other.tensors, strict=True):
        if dtype != other_dtype:
            return "dtype", dtype, other_dtype
        if one.kind in ("allgather", "alltoall"):
            if shape[1:] != other_shape[1:] or len(shape) != len(other_shape):
                return "shape after the first dimension", str(list(shape)), str(list(other_shape))
        elif shape != other_shape:
            return "shape", str(list(shape)), str(list(other_shape))
    if one.device != other.device:
        return "device", one.device, other.device
    if one.options != other.options:
        here, there = dict(one.options), dict(other.options)
        words = [word for word in {**here, **there} if here.get(word) != there.get(word)]
        word = words[0] if words else "order of options"
        return word, here.get(word, "nothing"), there.get(word, "nothing")
    return None


def ranks_in(ranks: int) -> list[int]:
    """The ranks of a set, rising."""
    return [rank for rank in range(ranks.bit_length()) if ranks >> rank & 1]


def _first_in(ranks: int) -> int:
    return (ranks & -ranks).bit_length() - 1
