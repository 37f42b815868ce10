"""One rank's part in finding out what is ready everywhere: it sends what it has to rank 0, which answers all ranks.

The books of rank 0 are in coordinator.py. In a large world announcements go up a tree of ranks, and answers down it
(tree.py), so that rank 0 hears and tells a few others only. A rank that leaves takes what is below it with it: those
ranks are told that nothing can be done any more.

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
from hvdkit.engine.named.operation import AllJoined, Announcement, Answer, Closed, Ready
from hvdkit.engine.named.tree import Merger, place_in_tree
from hvdkit.engine.observe.stall import Stalls, main_thread_stack
from hvdkit.engine.observe.stragglers import Stragglers, Window
from hvdkit.transport.mailbox import Mailbox


class Negotiator:
    """Announces for one rank of `mail`; all ranks make one together.

    heard: what rank 0 has answered, in its order; operations in one list have become ready together. windows: how
    rounds of plans went here, which the next message tells rank 0; for any thread. numbers: of this rank. closed: has
    rank 0 left, or a rank on the way to it? who: names a rank for messages. stragglers: hears how the rounds of plans
    go, on rank 0. hear_of_steps: is given what send() has sent. fanout: see tree.py. clock: in seconds.
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
        self._waiting: deque[tuple[str, Announcement]] = deque()
        self.windows: deque[Window] = deque()
        self._mail, self._rank, self._clock = mail, rank, clock
        self._stalls, self._stragglers, self._hear_of_steps = stalls, stragglers, hear_of_steps
        self._place = place_in_tree(rank, size, size if mail.star else fanout)
        self._coordinator = Coordinator(size, who, self.numbers) if rank == 0 else None
        self._merger = Merger(self._place.ranks) if rank and self._place.children else None

    def add(self, name: str, asked: Announcement) -> None:
        """Announce an operation with the next message; for any thread."""
        self._waiting.append((name, asked))

    @property
    def has_more(self) -> int:
        """How much waits for the next message."""
        return len(self._waiting) + len(self.windows)

    def turn(self) -> bool:
        """Send and receive what can be now; True if anything moved."""
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
        if self._merger is not None:
            moved = self._pass_on() or moved
        if self._coordinator is not None and self._coordinator.answers:
            self._answer()
            moved = True
        return moved

    def look(self) -> None:
        """Look for operations that have waited too long; called now and then."""
        if self._coordinator is not None:
            self._stalls.look(self._coordinator, lambda rank: self._mail.send(rank, _pack("stack?", None)))

    def send(self, rank: int, what: str, content: Any) -> None:
        """Send a rank a message of step_runner.py; from or to rank 0."""
        self._mail.send(rank, _pack(what, content))

    def leave(self, why: str) -> None:
        """Tell the others that this rank takes no further part. why: with its name."""
        if self._place.parent >= 0:
            self._mail.send(self._place.parent, _pack("leave", (self._rank, why)))
        self._send_down(_pack("closed", why))

    def close(self, *, idle: bool = True) -> None:
        """Close the mailbox; collective. idle: see Transport.close."""
        self._mail.close(idle=idle)

    def _enter(self, ranks: int, items: list[Item]) -> None:
        """Enter what some ranks announce into the books of this rank, or send it to the one that has some."""
        if self._coordinator is not None:
            self._coordinator.announce(ranks, items, self._clock())
        elif self._merger is not None:
            self._merger.announce(ranks, items, self._clock())
        else:
            self._send_up(ranks, items)

    def _send_up(self, ranks: int, items: list[Item]) -> None:
        encoded = [item if isinstance(item, int) else (item[0], item[1].encoded) for item in items]
        self._mail.send(self._place.parent, _pack("announce", (ranks, encoded)))

    def _pass_on(self) -> bool:
        assert self._merger is not None
        merged = self._merger.take(self._clock())
        for ranks, items in merged:
            self._send_up(ranks, items)
        return bool(merged)

    def _send_down(self, message: bytes) -> None:
        for first in reversed(self._place.children):  # the first one speaks for most
            self._mail.send(first, message)

    def _receive(self, sender: int, message: bytes) -> None:
        what, content = pickle.loads(message)
        if what == "announce":
            ranks, encoded = content
            self._enter(ranks, [item if isinstance(item, int) else (item[0], _decode(item[1])) for item in encoded])
        elif what == "answer":
            self._send_down(message)
            self.heard.append([self._understand(answer) for answer in content])
            if self._merger is not None:
                self._merger.answered(all_joined=any(isinstance(answer, AllJoined) for answer in content))
        elif what == "closed":
            self._send_down(message)
            self.closed = True
            self.heard.append([Closed(content)])
        elif what == "leave":
            self._left(*content)
        elif what == "stack?":
            self._mail.send(sender, _pack("stack", main_thread_stack()))
        elif what == "stack":
            self._stalls.hear(sender, content)
        elif what == "windows":
            if self._stragglers is not None:
                self._stragglers.hear(sender, content)
        elif self._hear_of_steps is not None:
            self._hear_of_steps(sender, what, content)

    def _left(self, rank: int, why: str) -> None:
        if self._coordinator is not None:
            self._coordinator.leave(rank, why)
        elif self._merger is not None:
            self._merger.flush()  # what it has announced before
            self._pass_on()
            self._mail.send(self._place.parent, _pack("leave", (rank, why)))

    def _answer(self) -> None:
        """Send every rank the answers, this one last, so that nobody waits for what it does."""
        assert self._coordinator is not None
        answers, self._coordinator.answers = self._coordinator.answers, []
        if self._place.children:
            encoded = [
                answer._replace(asked=answer.asked.encoded) if isinstance(answer, Ready) else answer  # type: ignore[arg-type]
                for answer in answers
            ]
            self._send_down(_pack("answer", encoded))
        self.heard.append(answers)

    def _understand(self, answer: Any) -> Answer:
        if isinstance(answer, Ready):
            answer = answer._replace(asked=_decode(answer.asked))
            if answer.number >= 0:
                number = self.numbers.add(answer.name, answer.asked)
                assert number == answer.number
        return answer  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=4096)
def _decode(encoded: bytes) -> Announcement:
    """The announcement of Announcement.encoded; the same object for the same bytes."""
    return Announcement(*pickle.loads(encoded))


def _pack(what: str, content: Any) -> bytes:
    return pickle.dumps((what, content), pickle.HIGHEST_PROTOCOL)
