"""Rank, size and process set as operations: evaluated when a graph runs, not when it is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.engine import basics
from hvdkit.engine import runtime as engine
from hvdkit.tensorflow.run import run
from hvdkit.tensorflow.tracing import in_python

#: Horovod's special values of process_set_included_op().
_NOT_INITIALIZED, _UNKNOWN_SET = -1, -3


def _ask(question: Callable[[], int], call: str) -> Any:
    return run(lambda: [np.array(question(), np.int32)], [], [(tf.int32, [])], call)[0]


@in_python
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of ranks of the process set, an int32 scalar.

    Raises ValueError for an unknown set, NotInitializedError before init().
    """

    def question() -> int:
        sets = engine.runtime("size_op()").sets.ids_and_ranks()
        if process_set_id not in sets:
            raise ValueError(
                f"size_op(): process set {process_set_id} does not exist; the existing ids are {sorted(sets)}."
            )
        return len(sets[process_set_id])

    return _ask(question, "size_op()")


@in_python
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return whether the process set includes this rank: 1 or 0, an int32 scalar; -1 before init(), -3 if unknown.

    It never raises an error.
    """

    def question() -> int:
        if not engine.is_initialized():
            return _NOT_INITIALIZED
        made = engine.runtime("process_set_included_op()")
        ranks = made.sets.ids_and_ranks().get(process_set_id)
        return _UNKNOWN_SET if ranks is None else int(made.world.rank in ranks)

    return _ask(question, "process_set_included_op()")


@in_python
def local_size_op(name: str | None = None) -> Any:
    """Return the number of this host's ranks, an int32 scalar. NotInitializedError before init()."""
    return _ask(basics.local_size, "local_size_op()")


@in_python
def rank_op(name: str | None = None) -> Any:
    """Return this process's rank, an int32 scalar. NotInitializedError before init()."""
    return _ask(basics.rank, "rank_op()")


@in_python
def local_rank_op(name: str | None = None) -> Any:
    """Return this process's local rank, an int32 scalar. NotInitializedError before init()."""
    return _ask(basics.local_rank, "local_rank_op()")
