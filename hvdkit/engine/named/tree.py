"""Ranks as a tree, so that in a large world none has to hear or tell more than a few others."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.engine.named.coordinator import Item
from hvdkit.engine.named.operation import JOINING, WITHDRAWING

#: Children of a rank: 585 ranks are three steps from the root at most, 4681 four; up to 9 hear it from the root itself.
FANOUT = 8
#: How long what only some ranks of a part have announced is kept there, in seconds.
HOLD_S = 0.01


@dataclass(frozen=True)
class Place:
    """Where a rank stands. A part of the tree is a run of ranks, the first of which speaks for all of them.

    stop: its part is from itself up to that rank. parent: -1 for the root. children: the first rank of each one's part.
    """

    rank: int
    stop: int
    parent: int
    children: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """The set of the ranks of its part."""
        return (1 << self.stop) - (1 << self.rank)


def place_in_tree(rank: int, size: int, fanout: int = FANOUT) -> Place:
    """The place of one of `size` ranks, of which 0 is the root."""
    parent, first, stop = -1, 0, size
    while True:
        each, more = divmod(stop - first - 1, fanout)
        firsts = [first + 1 + part * each + min(part, more) for part in range(min(fanout, stop - first - 1))]
        if rank == first:
            return Place(rank, stop, parent, tuple(firsts))
        parent = first
        first, stop = next(
            (start, end) for start, end in zip(firsts, [*firsts[1:], stop], strict=True) if start <= rank < end
        )


class Merger:
    """What the ranks of a part announce, passed on as one announcement of all of them where that is possible.

    An operation is passed on when all ranks of the part have announced it, be it in several forms, as the rows of an
    allgather are each rank's own. If that takes longer than HOLD_S it is passed on as far as it has come, since
    somebody is late, or missing, and has to be known by name; the rest follows at once.
    Announcements of a rank are never overtaken by those that it makes later and that are no operations: joining and
    withdrawing are passed on at once, after all else.

    ranks: of the part.
    """

    def __init__(self, ranks: int) -> None:
        self._everyone = ranks
        self._held: dict[int | str, dict[Item, int]] = {}  # by number or name
        self._partial: set[int | str] = set()  # passed on before all ranks had announced them
        self._joined = 0
        self._since_s = math.inf
        self._out: list[tuple[int, list[Item]]] = []

    def announce(self, ranks: int, items: Sequence[Item], now_s: float) -> None:
        """Some ranks of the part announce these."""
        complete: list[Item] = []
        for item in items:
            if not isinstance(item, int) and item[1].kind in (JOINING.kind, WITHDRAWING.kind):
                self.flush()
                self._joined |= ranks if item[1].kind == JOINING.kind else 0
                self._out.append((ranks, [item]))
                continue
            key = item if isinstance(item, int) else item[0]
            forms = self._held.pop(key, {})
            forms[item] = forms.get(item, 0) | ranks
            here = functools.reduce(operator.or_, forms.values())
            if here | self._joined == self._everyone and len(forms) == 1:
                complete.append(item)
            elif here | self._joined == self._everyone or key in self._partial:
                self._out += [(some, [form]) for form, some in forms.items()]
            else:
                self._held[key] = forms
                self._since_s = min(self._since_s, now_s)
        if complete:
            self._out.append((self._everyone & ~self._joined, complete))

    def flush(self) -> None:
        """Pass on everything."""
        self._partial |= self._held.keys()
        self._out += [(ranks, [item]) for forms in self._held.values() for item, ranks in forms.items()]
        self._held.clear()
        self._since_s = math.inf

    def answered(self, *, all_joined: bool) -> None:
        """Operations have been answered: whoever announces them from now on begins anew."""
        self._partial.clear()
        if all_joined:
            self._joined = 0

    def take(self, now_s: float) -> list[tuple[int, list[Item]]]:
        """What is to be passed on now: ranks, and what all of them announce."""
        if now_s - self._since_s > HOLD_S:
            self.flush()
        out, self._out = self._out, []
        return out
