"""Memory for results, which is reused after TensorFlow has freed the tensors in it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hvdkit.tensorflow.tensors import aligned_array, flat_storage
from hvdkit.transport.buffer import Array

_FREE = 2  # references to an array that only its list holds: the list's, and that of the count itself

_KEPT = 2  # arrays per tensor; a user may keep the last step's gradients


def counts_are_exact() -> bool:
    """Return whether reference counts show exactly if an array has a holder besides its list.

    Without the GIL another thread may take a reference after the count.
    """
    arrays = [aligned_array((1,), "float32")]
    alone = sys.getrefcount(arrays[0])
    held = arrays[0]
    counts = alone, sys.getrefcount(arrays[0])
    del held
    gil = getattr(sys, "_is_gil_enabled", None)  # Python 3.13 and later
    return counts == (_FREE, _FREE + 1) and (gil is None or gil())


_REUSES = counts_are_exact()


class ResultMemory:
    """Arrays for the tensors of a plan: one each, or more if results are kept for longer than a step.

    TensorFlow makes tensors of these arrays without a copy, and refers to the array as long as the tensor exists.
    New memory would cost more than the copy: the system clears each page of it.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> None:
        self._shapes, self._dtypes = shapes, dtypes
        self._arrays: list[list[Array]] = [[] for _ in shapes]
        self._taken: dict[int, Array] = {}

    def begin(self) -> None:
        """Begin a round: arrays of the last one now belong to their tensors."""
        self._taken.clear()

    def take(self, index: int) -> Array:
        """Return the array for a tensor's result in this round, in its shape."""
        if index not in self._taken:
            self._taken[index] = self._find(index)
        return self._taken[index]

    def _find(self, index: int) -> Array:
        arrays = self._arrays[index]
        for at in range(len(arrays) if _REUSES else 0):
            if sys.getrefcount(arrays[at]) == _FREE:
                return arrays[at]
        if len(arrays) == _KEPT:
            del arrays[0]  # its tensor keeps the array alive
        arrays.append(aligned_array(self._shapes[index], self._dtypes[index]))
        return arrays[-1]

    def __getitem__(self, index: int) -> Array:
        """See Targets. Returns the same array as (n,)."""
        return flat_storage(self.take(index), self._dtypes[index])
