"""Horovod's process sets: one for the same ranks, however often hvdkit asks for a group of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Ranks = tuple[int, ...]


class Sets:
    """Makes process sets known to Horovod; all ranks ask for the same in the same order.

    everyone: Horovod's set of all `size` ranks. add: Horovod's call, of which the result is kept until shutdown, since
    Horovod stops everything to forget a set.
    """

    def __init__(self, everyone: Any, size: int, add: Callable[[list[int]], Any]) -> None:
        self._known: dict[Ranks, Any] = {tuple(range(size)): everyone}
        self._add = add
        self._numbers = 0
        #: Its `name` is that of the step which the present thread is in, see HorovodTransport.within.
        self.step = threading.local()

    def find(self, ranks: Ranks) -> Any:
        """Horovod's process set of these ranks; collective over all ranks if it is new."""
        if ranks not in self._known:
            self._known[ranks] = self._add(list(ranks))
        return self._known[ranks]

    def number(self) -> int:
        """A number for a transport, the same on all ranks."""
        self._numbers += 1
        return self._numbers
