"""The coordinator: rank 0's record of the operations that ranks announce, and which are ready; no input or output.

Ranks announce operations in any order: by name, or by the number that an answer has given to the name. An operation is
ready when every rank that has not joined has announced it; if the announcements disagree, it fails on every rank
instead. All ranks receive the answers in the same order. Sets of ranks are integers, bit r for rank r.

Invariants:
- A number identifies one name with one announcement, forever, on all ranks: answers carry new numbers, in their order.
- Operations announced by number are in `_numbered`, all others in `_pending`; no operation is in both. While a rank has
  joined or left, `_numbered` is empty, so only `_pending` accounts for joined and missing ranks.
- No entry of `_pending` or `_numbered` is complete: the announcement that completes an entry removes it, and appends
  its answer.
- A rank announces a name again only after its answer. This follows from the common order and from unique names on a
  rank.
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
    Answer,
    Failed,
    OperationRequest,
    Ready,
)

#: Kinds of operations in which joined ranks take part, with zeros or without data.
_WITH_JOINED = frozenset({"allreduce", "barrier", "plan", "sparse_gradients", "gradients", "tune"})
#: Kinds whose announcements contain no values that differ between ranks, such as rows: these get numbers.
_NUMBERED = frozenset({"allreduce", "broadcast", "barrier", "reducescatter"})
_MOST_NUMBERS = 4096
_MOST_REMEMBERED = 4096  # operations that have been ready once

#: An entry of an announcement: a number, or a name with the request.
Item = int | tuple[str, OperationRequest]


class Numbers:
    """The numbers of operations, as all ranks know them; equal on ranks that have received the same answers."""

    def __init__(self) -> None:
        self.by_name: dict[str, tuple[OperationRequest, int]] = {}
        self.ready: list[Ready] = []  # index: the number

    def add(self, name: str, request: OperationRequest) -> int:
        """Give the next number to an operation."""
        self.by_name[name] = request, len(self.ready)
        self.ready.append(Ready(name, request))
        return len(self.ready) - 1

    def item(self, name: str, request: OperationRequest) -> Item:
        """Return the number by which an operation can be announced, or else its name and request."""
        known = self.by_name.get(name)
        if known is None or (known[0] is not request and known[0] != request):
            return name, request
        if known[0] is not request:
            self.by_name[name] = request, known[1]  # the next comparison of the same object is faster
        return known[1]


@dataclass
class _Pending:
    """An operation that some ranks have announced.

    since_s: time of the first announcement. announced: request -> the ranks that announced it. here: all these ranks.
    """

    since_s: float
    announced: dict[OperationRequest, int] = field(default_factory=dict)
    here: int = 0

    def add(self, ranks: int, request: OperationRequest) -> None:
        if self.here & ranks:
            self.remove(ranks)
        self.announced[request] = self.announced.get(request, 0) | ranks
        self.here |= ranks

    def remove(self, ranks: int) -> None:
        self.announced = {request: rest for request, those in self.announced.items() if (rest := those & ~ranks)}
        self.here &= ~ranks


class Waiting(NamedTuple):
    """An operation that has been waiting for some ranks.

    name: of the operation.
    kind: of the operation, as one of the ranks announced it.
    seconds: since its first announcement.
    present: the ranks that have announced it.
    missing: the ranks that have neither announced it nor joined.
    """

    name: str
    kind: str
    seconds: float
    present: tuple[int, ...]
    missing: tuple[int, ...]


class Coordinator:
    """Tracks the announcements of `size` ranks and decides which operations are ready.

    who: names a rank for messages, e.g. "rank 3 (host n1)". numbers: rank 0's; the coordinator adds new numbers.
    """

    def __init__(self, size: int, who: Callable[[int], str], numbers: Numbers | None = None) -> None:
        self._size, self._who = size, who
        self._everyone = (1 << size) - 1
        self.numbers = Numbers() if numbers is None else numbers
        self.answers: list[Answer] = []  # removed by the caller of announce()
        self._pending: dict[str, _Pending] = {}
        self._numbered: dict[int, tuple[int, float]] = {}  # number -> ranks, and since when
        self._once: dict[
            str, OperationRequest
        ] = {}  # operations that were ready once; the second time they get a number
        self._joined: list[int] = []  # in the order in which they joined
        self._joined_set = 0
        self._left: dict[int, str] = {}

    def announce(self, ranks: int, items: Sequence[Item], now_s: float) -> None:
        """Record the announcements of some ranks, in their order."""
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
            name, request = ready[item][:2] if isinstance(item, int) else item
            if request.kind == JOINING.kind:
                self._join(ranks)
                special = True
            elif request.kind == WITHDRAWING.kind:
                self._withdraw(ranks, name)
            else:
                pending = self._by_name(name) or pendings.setdefault(name, _Pending(now_s))
                pending.add(ranks, request)
                self._decide(name)

    def _by_name(self, name: str) -> _Pending | None:
        """Move an operation from `_numbered` to `_pending`; None if it has not been announced by number."""
        request, number = self.numbers.by_name.get(name, (JOINING, -1))
        if number not in self._numbered:
            return None
        here, since_s = self._numbered.pop(number)
        pending = self._pending[name] = _Pending(since_s)
        pending.add(here, request)
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
        """Record that ranks have joined: they take part with zeros in the others' work until all ranks have joined."""
        self._all_by_name()
        self._joined += ranks_in(ranks)
        self._joined_set |= ranks
        self._fail_join()
        for name in list(self._pending):
            self._decide(name)
        if len(self._joined) == self._size:
            self.answers.append(AllJoined(self._joined[-1]))
            self._joined, self._joined_set = [], 0

    def leave(self, rank: int, why: str) -> None:
        """Record that a rank announces nothing any more: operations that wait for it fail, now and later."""
        self._all_by_name()
        self._left[rank] = why
        for name in list(self._pending):
            self._decide(name)
        self._fail_join()

    def _fail_join(self) -> None:
        """Fail join() if a rank has left without joining, because then not all ranks can join."""
        gone = [why for rank, why in self._left.items() if rank not in self._joined]
        if self._joined and gone:
            waiting = self._list(sorted(self._joined))
            why = f"{gone[0]}, but join() waits for it on {waiting}. Call join() on every rank."
            self.answers.append(Failed(JOIN, why))

    def give_up(self, name: str, why: str) -> None:
        """Fail an operation that has waited too long."""
        if self._pending.pop(name, None) is not None:
            self.answers.append(Failed(name, why))

    def waiting(self, now_s: float) -> list[Waiting]:
        """Return the operations that are not ready."""
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

    def _decide(self, name: str) -> None:
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
        """Add a number to the answer if the operation is ready for the second time under the same name."""
        name, request = ready.name, ready.request
        if request.kind not in _NUMBERED or ready.joined or name in self.numbers.by_name:
            return ready
        if self._once.pop(name, None) == request and len(self.numbers.ready) < _MOST_NUMBERS:
            return ready._replace(number=self.numbers.add(name, request))
        self._once[name] = request
        if len(self._once) > _MOST_REMEMBERED:
            del self._once[next(iter(self._once))]
        return ready

    def _list(self, ranks: Sequence[int]) -> str:
        return ", ".join(self._who(rank) for rank in ranks)


def agree(
    name: str, announced: dict[OperationRequest, int], size: int, joined: tuple[int, ...], who: Callable[[int], str]
) -> Ready | Failed:
    """Compare the ranks' announcements of one operation.

    name: of the operation.
    announced: request -> the set of ranks that announced it.
    size: number of ranks.
    joined: the other ranks, all of which have joined.
    who: names a rank for messages.
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
        for request, ranks in announced.items():
            for rank in ranks_in(ranks):
                rows[rank] = (
                    request.splits if first.kind == "alltoall" else tuple(shape[0] for _, shape in request.tensors)
                )
    return Ready(name, first, tuple(rows), joined)


def _difference(one: OperationRequest, other: OperationRequest) -> tuple[str, str, str] | None:
    """Return the first forbidden difference between two announcements, as (what, here, there); None without one."""
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
    """Return the ranks of a set, in ascending order."""
    return [rank for rank in range(ranks.bit_length()) if ranks >> rank & 1]


def _first_in(ranks: int) -> int:
    return (ranks & -ranks).bit_length() - 1
