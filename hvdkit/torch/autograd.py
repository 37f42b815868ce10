"""When does a backward pass end? autograd says so, once for all optimizers concerned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch.autograd import Variable

NO_TASK = -1

#: Taken by a hook that is the first one of a pass: autograd runs the hooks of each device in a thread of its own.
first_of_pass = threading.RLock()

_concerned: dict[int, list[Reducer]] = {}


class Reducer(Protocol):
    """What wants to know."""

    number: int

    def backward_ended(self, task: int) -> bool:
        """Take note; True if gradients are to be reduced now."""

    def flush(self) -> None:
        """Reduce them; collective."""


#: autograd's number of the backward pass that runs in this thread, rising; NO_TASK outside of one. Asked by every hook.
current_task: Callable[[], int] = torch._C._current_graph_task_id


def when_backward_ends(reducer: Reducer, task: int) -> None:
    """Tell `reducer` when the running pass `task` has ended without an exception; called from inside of it."""
    with first_of_pass:
        if task not in _concerned:
            _concerned[task] = []
            Variable._execution_engine.queue_callback(lambda: _ended(task))
        _concerned[task].append(reducer)


def forget(task: int) -> None:
    """The pass has ended with an exception."""
    _concerned.pop(task, None)


def _ended(task: int) -> None:
    # By number, so that all ranks reduce the gradients of several optimizers in the same order.
    reducers = sorted(_concerned.pop(task, []), key=lambda reducer: reducer.number)
    for reducer in [reducer for reducer in reducers if reducer.backward_ended(task)]:
        reducer.flush()
