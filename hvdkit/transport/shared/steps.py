"""Steps of the ranks of a host: the one protocol by which a rank uses memory after other ranks have used it.

All ranks do the same steps, in the same order. A rank shows step n by storing n in its flag, which it alone writes. It
passes step n when it has read n or more in every rank's flag. So one rule holds, whatever the memory contains:

    What a rank did before it showed step n precedes what any rank does after it has passed step n.

The rule needs two orders of memory accesses: Flags.show() stores the flag after all earlier reads and writes, and
Flags.everyone() does all later reads and writes after it has read the flags. x86 keeps both orders by itself; it only
delays stores beyond later loads, which the rule allows. Other processors get a full fence, order(). A flag is 8
aligned bytes, which processors load and store at once.

Memory is used in one of two ways, and both follow from the rule:

In halves, a step for each exchange. Before a rank shows step n, it writes half n % 2 of its own memory; after it has
passed step n and until it shows step n + 1, it reads this half of all ranks. It writes its own half again for step
n + 2, after it has passed step n + 1: by then all ranks have shown n + 1, and so have read what they needed of step n.
Meanwhile a faster rank writes the other half, for step n + 1. So two halves and one flag are enough.

In place, two steps for each reduction. Before a rank shows the first one, ready, it writes its own memory. After it has
passed it and until it shows the second one, reduced, rank i uses shard i of every rank's memory, and nothing else, and
may overwrite it. After it has passed the second one it uses its own memory, and all of it, because all ranks have done
with it. So one memory is enough, and it may be filled for the next reduction at once.

A lane is a sequence of steps of its own, such as the reductions of one bucket. Lanes may share memory that is used in
place, if each rank begins a reduction in one lane after it has passed the second step of the last one in the other.

A rank that fails between two steps does not show the next one. So the others do not pass it, and use no memory too
early: they wait, and `check` raises RankLostError when the rank has ended or has left. But ranks may be at different
steps then. So calls().uncertain becomes True, and the steps must not be continued.
"""

from __future__ import annotations

import contextlib
import platform
import threading
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from hvdkit.transport.api import Transport
from hvdkit.transport.polling import Backoff, calls
from hvdkit.transport.shared.segment import open_segment

_LINE = 8  # int64 in a cache line, so that no two ranks write to the same one

_gate = threading.Lock()


def _fence() -> None:
    # A release followed by an acquire of the same lock orders the writes before it before those after it.
    with _gate:
        pass
    with _gate:
        pass


def _no_fence() -> None:
    """Do nothing, because x86 makes stores visible in program order."""


_ordered = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
order: Callable[[], None] = _no_fence if _ordered else _fence


def flag_bytes(ranks: int, count: int) -> int:
    """Return the bytes of shared memory for `count` flags of each of `ranks` ranks."""
    return ranks * _padded(count) * 8


def _padded(count: int) -> int:
    return -(-count // _LINE) * _LINE


class Flags:
    """`count` flags for each rank of a host, each the number of a step; each rank raises its own and reads all.

    memory: (flag_bytes(ranks, count),) uint8, shared, zeroed, aligned to 64 bytes.
    shown: the numbers of the last steps that this rank has shown, by flag.
    """

    def __init__(self, memory: NDArray[np.uint8], *, rank: int, ranks: int, count: int) -> None:
        stride = _padded(count)
        self.shown = [0] * count
        self._numbers = memory.data.cast("q")  # much faster than numpy for single numbers
        self._own = rank * stride
        self._peers = [peer * stride for peer in range(ranks) if peer != rank]

    def show(self, index: int = 0) -> int:
        """Show the next step, after all earlier reads and writes of this rank; return its number.

        An exception from the handler of a signal may interrupt this at any instruction. `shown` is never less than the
        flag: peers that have not seen the step wait. Otherwise this rank would show it again, after it has written to
        memory that peers already use.
        """
        number = self.shown[index] + 1
        self.shown[index] = number
        order()
        self._numbers[self._own + index] = number
        return number

    def everyone(self, index: int, number: int) -> bool:
        """Return whether all other ranks have shown step `number`, before all later reads and writes of this rank."""
        numbers = self._numbers
        for start in self._peers:
            if numbers[start + index] < number:
                return False
        order()
        return True

    def close(self) -> None:
        """Release the memory."""
        self._numbers.release()


class SharedSteps:
    """The steps of a group's ranks on one host, and the memory that they use in them; all ranks make and close it.

    group: transport of the ranks.
    nbytes: bytes of each rank's memory.
    directory: a memory file system that the ranks share.
    check: called now and then in waits; raises RankLostError if a peer has ended.
    lanes: number of independent sequences of steps; `half` and pass_step() are for the first one.
    memory: (ranks, nbytes) uint8, every rank's.
    halves: its halves, by half and rank.
    half: the half for the next step.
    show, everyone, shown: see Flags; the index is the lane's.
    """

    def __init__(
        self, group: Transport, nbytes: int, *, directory: str, check: Callable[[], None], lanes: int = 1
    ) -> None:
        self._check = check
        start = flag_bytes(group.size, lanes)
        # flags | memory of rank 0 | memory of rank 1 | ...
        self.segment = open_segment(group, [start + nbytes] + [nbytes] * (group.size - 1), directory)
        self._flags = Flags(self.segment.memory[:start], rank=group.rank, ranks=group.size, count=lanes)
        self.show, self.everyone, self.shown = self._flags.show, self._flags.everyone, self._flags.shown
        self.memory = self.segment.memory[start:].reshape(group.size, nbytes)
        middle = nbytes // 2
        self.half = 1
        self.halves = [[part[at : at + middle] for part in self.memory] for at in (0, middle)]

    def pass_step(self) -> None:
        """Show the next step of the first lane, and wait until this rank has passed it."""
        flags = self._flags
        try:
            number = flags.show()
            self.half = (number + 1) & 1
            if not flags.everyone(0, number):
                backoff = Backoff(self._check)
                while not flags.everyone(0, number):
                    backoff.pause()
        except BaseException:  # whatever ends it, a signal's handler too, the ranks may be at different steps
            calls().uncertain = True
            raise

    def close(self) -> None:
        """Release the memory."""
        self._flags.close()
        self.memory, self.halves = np.empty((0, 0), np.uint8), []
        self.segment.close()


@contextlib.contextmanager
def several_steps() -> Iterator[None]:
    """Return a context for a collective of several steps, in any of which others may wait after an error."""
    calls().begun += 1
    try:
        yield
    except BaseException:  # whatever ends it, the ranks may be at different steps
        calls().uncertain = True
        raise
