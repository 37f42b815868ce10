"""One rank's side of the negotiation: it announces operations to rank 0, which answers all ranks when they are ready.

Rank 0's record of announcements is in coordinator.py. In a large world announcements go up a tree of ranks, and answers
down it (tree.py), so that rank 0 exchanges messages with a few others only. When a rank leaves, the ranks below it in
the tree are cut off: they are informed, and fail all operations.

All methods but add() are called by one thread at a time.
"""

from __future__ import annotations

import functools
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hvdkit.engine.named.coordinator import Coordinator, Item, Numbers
from hvdkit.engine.named.operation import AllJoined, Answer, Closed, OperationRequest, Ready
from hvdkit.engine.named.tree import TreeAggregator, position_in_tree
from hvdkit.engine.observe.stall import Stalls, main_thread_stack
from hvdkit.engine.observe.stragglers import Stragglers, Window
from hvdkit.transport.mailbox import Mailbox


class Negotiator:
    """Announces the operations of one rank; all ranks make a Negotiator together.

    Arguments:
    mail: the mailbox that connects the ranks.
    rank: this rank's number.
    size: number of ranks.
    who: names a rank for messages.
    stalls: reports operations that wait too long, on rank 0.
    fanout: see tree.py.
    stragglers: receives the windows of all ranks, on rank 0; None for none.
    hear_of_steps: called with sender, kind and content of each message that a rank has sent with send().
    clock: returns the time in seconds.

    Attributes:
    heard: rank 0's answers, in its order; operations in one list have become ready together.
    windows: times of this rank's rounds of plans, which the next message sends to rank 0; for any thread.
    numbers: this rank's numbers of operations.
    closed: Has rank 0 left, or a rank between it and this rank in the tree?
    """

    def __init__(
        self,
        mail: Mailbox,
        rank: int,
        size: int,
        *,
        who: Callable[[int], str],
        stalls: Stalls,
        fanout: int,
        stragglers: Stragglers | None = None,
        hear_of_steps: Callable[[int, str, Any], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.heard: deque[Sequence[Answer]] = deque()
        self.numbers = Numbers()
        self.closed = False
        self._waiting: deque[tuple[str, OperationRequest]] = deque()
        self.windows: deque[Window] = deque()
        self._mail, self._rank, self._clock = mail, rank, clock
        self._stalls, self._stragglers, self._hear_of_steps = stalls, stragglers, hear_of_steps
        self._place = position_in_tree(rank, size, size if mail.star else fanout)
        self._coordinator = Coordinator(size, who, self.numbers) if rank == 0 else None
        self._aggregator = TreeAggregator(self._place.ranks) if rank and self._place.children else None

    def add(self, name: str, request: OperationRequest) -> None:
        """Announce an operation with the next message; for any thread."""
        self._waiting.append((name, request))

    @property
    def has_more(self) -> int:
        """The number of items that wait for the next message."""
        return len(self._waiting) + len(self.windows)

    def turn(self) -> bool:
        """Send and receive messages without waiting. Returns True if there was progress."""
        moved = False
        if waiting := self._waiting:
            item = self.numbers.item
            self._enter(1 << self._rank, [item(*waiting.popleft()) for _ in range(len(waiting))])
            moved = True
        if windows := self.windows:
            self._mail.send(0, _pack("windows", [windows.popleft() for _ in range(len(windows))]))
        for sender, message in self._mail.receive():
            moved = True
            self._receive(sender, message)
        if self._aggregator is not None:
            moved = self._pass_on() or moved
        if self._coordinator is not None and self._coordinator.answers:
            self._answer()
            moved = True
        return moved

    def check(self) -> None:
        """Check for operations that have waited too long; called at intervals."""
        if self._coordinator is not None:
            self._stalls.check(self._coordinator, lambda rank: self._mail.send(rank, _pack("stack?", None)))

    def send(self, rank: int, what: str, content: Any) -> None:
        """Send a rank a message of step_runner.py; sender or receiver is rank 0."""
        self._mail.send(rank, _pack(what, content))

    def leave(self, why: str) -> None:
        """Notify the other ranks that this rank has stopped. why: the reason, with this rank's name."""
        if self._place.parent >= 0:
            self._mail.send(self._place.parent, _pack("leave", (self._rank, why)))
        self._send_down(_pack("closed", why))

    def close(self, *, idle: bool = True) -> None:
        """Close the mailbox; collective. idle: see Transport.close."""
        self._mail.close(idle=idle)

    def _enter(self, ranks: int, items: list[Item]) -> None:
        """Pass the announcements of some ranks to this rank's coordinator or merger, or send them to the parent."""
        if self._coordinator is not None:
            self._coordinator.announce(ranks, items, self._clock())
        elif self._aggregator is not None:
            self._aggregator.announce(ranks, items, self._clock())
        else:
            self._send_up(ranks, items)

    def _send_up(self, ranks: int, items: list[Item]) -> None:
        encoded = [item if isinstance(item, int) else (item[0], item[1].encoded) for item in items]
        self._mail.send(self._place.parent, _pack("announce", (ranks, encoded)))

    def _pass_on(self) -> bool:
        assert self._aggregator is not None
        merged = self._aggregator.take(self._clock())
        for ranks, items in merged:
            self._send_up(ranks, items)
        return bool(merged)

    def _send_down(self, message: bytes) -> None:
        for first in reversed(self._place.children):  # the first child may have the largest subtree
            self._mail.send(first, message)

    def _receive(self, sender: int, message: bytes) -> None:
        what, content = pickle.loads(message)
        if what == "announce":
            ranks, encoded = content
            self._enter(ranks, [item if isinstance(item, int) else (item[0], _decode(item[1])) for item in encoded])
        elif what == "answer":
            self._send_down(message)
            self.heard.append([self._understand(answer) for answer in content])
            if self._aggregator is not None:
                self._aggregator.answered(all_joined=any(isinstance(answer, AllJoined) for answer in content))
        elif what == "closed":
            self._send_down(message)
            self.closed = True
            self.heard.append([Closed(content)])
        elif what == "leave":
            self._left(*content)
        elif what == "stack?":
            self._mail.send(sender, _pack("stack", main_thread_stack()))
        elif what == "stack":
            self._stalls.on_message(sender, content)
        elif what == "windows":
            if self._stragglers is not None:
                self._stragglers.on_message(sender, content)
        elif self._hear_of_steps is not None:
            self._hear_of_steps(sender, what, content)

    def _left(self, rank: int, why: str) -> None:
        if self._coordinator is not None:
            self._coordinator.leave(rank, why)
        elif self._aggregator is not None:
            self._aggregator.flush()  # pass on its earlier announcements first
            self._pass_on()
            self._mail.send(self._place.parent, _pack("leave", (rank, why)))

    def _answer(self) -> None:
        """Send the answers to every rank, and then queue them here, so that no rank waits for this rank's work."""
        assert self._coordinator is not None
        answers, self._coordinator.answers = self._coordinator.answers, []
        if self._place.children:
            encoded = [
                answer._replace(request=answer.request.encoded) if isinstance(answer, Ready) else answer  # type: ignore[arg-type]
                for answer in answers
            ]
            self._send_down(_pack("answer", encoded))
        self.heard.append(answers)

    def _understand(self, answer: Any) -> Answer:
        if isinstance(answer, Ready):
            answer = answer._replace(request=_decode(answer.request))
            if answer.number >= 0:
                number = self.numbers.add(answer.name, answer.request)
                assert number == answer.number
        return answer  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=4096)
def _decode(encoded: bytes) -> OperationRequest:
    """Decode OperationRequest.encoded; returns the same object for the same bytes."""
    return OperationRequest(*pickle.loads(encoded))


def _pack(what: str, content: Any) -> bytes:
    return pickle.dumps((what, content), pickle.HIGHEST_PROTOCOL)
