"""One rank's part in finding out what is ready everywhere: announcements up a tree of ranks, answers down it.

The ranks of a small world all announce to rank 0, the root. In a larger one a rank that has others below it gathers
what they have (collecting.py), so that no rank hears or tells more than a few others; the root keeps the books
(negotiation.py). Messages are pickled; what two ranks have said to each other once goes as a number (vocabulary.py).

A rank that leaves the others takes what is below it with it: those ranks are told that nothing can be done any more.
"""

from __future__ import annotations

import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from hvdkit.engine.named.announcement import Announcement, Ready
from hvdkit.engine.named.collecting import JOINING, WITHDRAWING, Collector
from hvdkit.engine.named.coordinator import Answer, Coordinator
from hvdkit.engine.named.intern_table import Heard, Said
from hvdkit.engine.named.operation_ids import Directory, Numbers
from hvdkit.engine.named.queue import Outbox
from hvdkit.engine.named.tree import place_in_tree, run_of
from hvdkit.engine.observe.stall import Stalls, main_thread_stack
from hvdkit.engine.observe.stragglers import Stragglers
from hvdkit.transport.mailbox import Mailbox

#: Of an announcement in a message: name, what Said.say() gives for it, lane, and ranks, as bits that count from the
#: sender; -1 for all of its part.
Item = tuple[str, int, Announcement | None, int, int]

#: The same before it is said: name, announcement, lane, ranks.
_Plain = tuple[str, Announcement, int, int]

_ALL = -1


class Listener(Protocol):
    """Who does what is ready; called by turn()."""

    def answered(self, answers: Sequence[Answer]) -> None:
        """Do these, in this order."""

    def withdrawn(self, name: str) -> None:
        """The announcement of this operation has been taken back: no answer to it will come."""

    def failed(self, why: str) -> None:
        """Nothing can be done any more."""


class Negotiator:
    """Announces for one rank of `mail`; all ranks make one together.

    who: names a rank for messages. stragglers: hears how the rounds of plans go, on rank 0. hear_of_steps: is given
    what send_of_steps() has sent. fanout: see tree.py. clock: in seconds.
    """

    def __init__(
        self,
        mail: Mailbox,
        rank: int,
        size: int,
        *,
        who: Callable[[int], str],
        listener: Listener,
        stalls: Stalls,
        fanout: int,
        stragglers: Stragglers | None = None,
        hear_of_steps: Callable[[int, str, Any], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = Directory()
        self.outbox = Outbox()
        self._mail, self._rank = mail, rank
        self._listener, self._stalls, self._clock = listener, stalls, clock
        self._stragglers, self._hear_of_steps = stragglers, hear_of_steps
        self._place = place = place_in_tree(rank, size, fanout)
        parts = [1 << rank, *(run_of(*child) for child in place.children)]
        self._part_of = {first: part for part, first in enumerate([rank, *(first for first, _ in place.children)])}
        self._parts = parts
        self._coordinator = Coordinator(size, who, parts) if rank == 0 else None
        self._collector = Collector(parts, self.directory) if rank and place.children else None
        self._saying: Said[Announcement] = Said()
        self._heard: defaultdict[int, Heard[Announcement]] = defaultdict(Heard)
        self._telling: Said[tuple[Any, ...]] = Said()
        self._told: Heard[tuple[Any, ...]] = Heard()

    def turn(self, met: int = 0) -> bool:
        """Send, receive and have done what can be done now; True if anything moved. met: see FastLane."""
        moved = self._post(met)
        paces = self.outbox.take_windows()
        if paces:
            self._mail.send(0, _pack("pace", paces))
        for sender, message in self._mail.receive():
            moved = True
            what, content = pickle.loads(message)
            if what in ("answer", "closed") and sender != self._rank:
                self._send_down(message)
            self._receive(sender, what, content)
        if self._collector is not None:
            moved = self._pass_on() or moved
        if self._coordinator is not None:
            self._stalls.look(self._coordinator, lambda rank: self._mail.send(rank, _pack("stack?", None)))
            moved = self._tell() or moved
        return moved

    def take_back(self, name: str, met: int) -> None:
        """Take back what has been announced to the root itself; it is going to say that it knows."""
        self._post(met)
        self._mail.send(0, _pack("withdraw", name))

    def send_of_steps(self, rank: int, what: str, content: Any) -> None:
        """Send a rank a message of steps.py, past the tree."""
        self._mail.send(rank, _pack(what, content))

    def leave(self, why: str) -> None:
        """Tell the others that this rank takes no further part. why: with its name."""
        if self._place.parent >= 0:
            self._mail.send(self._place.parent, _pack("leave", (self._rank, why)))
        self._send_down(_pack("closed", why))

    def close(self, *, idle: bool = True) -> None:
        """Close the mailbox; collective. idle: see Transport.close."""
        self._mail.close(idle=idle)

    def _post(self, met: int) -> bool:
        """Announce what waits."""
        waiting = self.outbox.take() if self.outbox else []
        if not waiting:
            return False
        numbers: list[int] = []
        items: list[_Plain] = []
        find = self.directory.find
        for name, asked, lane in waiting:
            number = -1 if lane else find(name, asked)
            if number >= 0:
                numbers.append(number)
            else:
                items.append((name, asked, lane, _ALL))
        if self._books is None:
            self._send_up(met, np.array(numbers, np.int32), items)
        else:
            own = [(name, asked, lane, self._parts[0]) for name, asked, lane, _ in items]
            self._take_in(0, met, np.array(numbers, np.int32), own)
        return True

    @property
    def _books(self) -> Coordinator | Collector | None:
        """What others announce to this rank is entered there."""
        return self._coordinator or self._collector

    def _pass_on(self, *, all_of_it: bool = False) -> bool:
        """Announce what has been gathered."""
        assert self._collector is not None
        numbers, gathered = self._collector.take(self._clock(), all_of_it=all_of_it)
        if not numbers and not gathered:
            return False
        whole = sum(self._parts)
        items = [(name, asked, 0, _ALL if ranks == whole else ranks >> self._rank) for name, asked, ranks in gathered]
        self._send_up(0, np.concatenate(numbers) if numbers else np.array([], np.int32), items)
        return True

    def _send_up(self, met: int, numbers: Numbers, items: Sequence[_Plain]) -> None:
        said = [(name, *self._saying.say(asked), lane, ranks) for name, asked, lane, ranks in items]
        self._mail.send(self._place.parent, _pack("announce", (met, numbers.tobytes(), said)))

    def _send_down(self, message: bytes) -> None:
        for first, _ in reversed(self._place.children):
            self._mail.send(first, message)

    def _receive(self, sender: int, what: str, content: Any) -> None:
        if what == "announce":
            met, numbers, items = content
            self._take_in(self._part_of[sender], met, np.frombuffer(numbers, np.int32), self._hear(sender, items))
        elif what == "answer":
            self._answered(content)
        elif what == "withdraw":
            assert self._coordinator is not None
            self._tell()  # before the word that no answer will come
            self._coordinator.withdraw(1 << sender, content)
            self._mail.send(sender, _pack("withdrawn", content))
        elif what == "withdrawn":
            self._listener.withdrawn(content)
        elif what == "leave":
            self._left(*content)
        elif what == "stack?":
            self._mail.send(sender, _pack("stack", main_thread_stack()))
        elif what == "stack":
            self._stalls.hear(sender, content)
        elif what == "pace":
            if self._stragglers is not None:
                self._stragglers.hear(sender, content)
        elif what == "closed":
            self._listener.failed(content)
        elif self._hear_of_steps is not None:
            self._hear_of_steps(sender, what, content)

    def _hear(self, sender: int, items: Sequence[Item]) -> list[_Plain]:
        heard, whole = self._heard[sender], self._parts[self._part_of[sender]]
        return [
            (name, heard.hear(number, said), lane, whole if ranks == _ALL else ranks << sender)
            for name, number, said, lane, ranks in items
        ]

    def _take_in(self, part: int, met: int, numbers: Numbers, items: Sequence[_Plain]) -> None:
        """Enter into the books what a part announces."""
        now = self._clock()
        if self._coordinator is not None:
            self._coordinator.met_before(met)
        books = self._books
        assert books is not None
        if numbers.size:
            books.announce_many(part, numbers, now)
        for name, asked, lane, ranks in items:
            if asked == JOINING:
                books.join(ranks)
            elif asked == WITHDRAWING:
                books.withdraw(ranks, name)
            else:
                books.announce(ranks, name, asked, now, lane)

    def _left(self, rank: int, why: str) -> None:
        if self._coordinator is not None:
            self._coordinator.leave(rank, why)
        else:
            self._pass_on(all_of_it=True)  # what it has announced before
            self._mail.send(self._place.parent, _pack("leave", (rank, why)))

    def _tell(self) -> bool:
        """Let every rank know what has been settled, this one last, so that nobody waits for what it does."""
        assert self._coordinator is not None
        answers = self._coordinator.take_answers()
        if not answers:
            return False
        said = [
            (answer.name, *self._telling.say((answer.asked, answer.rows, answer.joined)), answer.lane, answer.number)
            if isinstance(answer, Ready)
            else answer
            for answer in answers
        ]
        message = _pack("answer", said)
        self._send_down(message)
        self._mail.send(0, message)
        return True

    def _answered(self, said: Sequence[Any]) -> None:
        answers = [self._understand(one) if isinstance(one, tuple) else one for one in said]
        if self._collector is not None:
            for answer in answers:
                self._collector.answered(answer)
        self._listener.answered(answers)

    def _understand(self, said: tuple[Any, ...]) -> Ready:
        name, number, thing, lane, known_as = said
        asked, rows, joined = self._told.hear(number, thing)
        ready = Ready(name, asked, rows, joined, lane, known_as)
        if known_as >= 0:
            self.directory.add(ready)
        return ready


def _pack(what: str, content: Any) -> bytes:
    return pickle.dumps((what, content), pickle.HIGHEST_PROTOCOL)
