"""Generation numbers in shared memory: how ranks of one host tell each other that something is done."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_LINE = 8  # int64 in a cache line, so that no two ranks write to the same one

_gate = threading.Lock()


def _fence() -> None:
    # A release followed by an acquire of the same lock keeps what was written before it from being seen after it.
    with _gate:
        pass
    with _gate:
        pass


def _no_fence() -> None:
    """x86 lets stores be seen in the order in which they were made."""


_ordered = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
order: Callable[[], None] = _no_fence if _ordered else _fence


def flag_bytes(ranks: int, count: int) -> int:
    """Bytes of shared memory for `count` flags of each of `ranks` ranks."""
    return ranks * _padded(count) * 8


def _padded(count: int) -> int:
    return -(-count // _LINE) * _LINE


class Flags:
    """`count` generation numbers for each rank of a host; each rank raises its own and reads all.

    memory: (flag_bytes(ranks, count),) uint8, shared, zeroed, aligned to 64 bytes.
    """

    def __init__(self, memory: NDArray[np.uint8], *, rank: int, ranks: int, count: int) -> None:
        stride = _padded(count)
        self._numbers = memory.data.cast("q")  # much faster than numpy for single numbers
        self._own = rank * stride
        self._peers = [peer * stride for peer in range(ranks) if peer != rank]

    def show(self, index: int, generation: int) -> None:
        """Tell the others that this rank has done `generation` of `index`, and all that it wrote before."""
        order()
        self._numbers[self._own + index] = generation

    def everyone(self, index: int, generation: int) -> bool:
        """Have all others done `generation` of `index`?"""
        numbers = self._numbers
        for start in self._peers:
            if numbers[start + index] < generation:
                return False
        order()
        return True

    def close(self) -> None:
        """Let go of the memory."""
        self._numbers.release()
