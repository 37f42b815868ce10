"""The end of a backward pass: one callback of autograd for all optimizers that take part in it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch
from torch.autograd import Variable

from hvdkit.torch.uncompiled import uncompiled

NO_TASK = -1

#: The first hook of a pass holds this lock: autograd runs the hooks of each device in a thread of its own.
first_of_pass = threading.RLock()

#: Backward pass under way -> number of an optimizer -> callback for the end of the pass; see when_backward_ends.
_callbacks: dict[int, dict[int, Callable[[bool], None]]] = {}

#: autograd's number of the backward pass that runs in this thread, rising; NO_TASK outside of one. Every hook calls it.
current_task: Callable[[], int] = torch._C._current_graph_task_id


def when_backward_ends(task: int, number: int, callback: Callable[[bool], None]) -> None:
    """Call `callback` for optimizer `number` when the running pass `task` has ended without an exception.

    Called from inside of the pass. callback: gets True; False if the callback of an earlier optimizer has raised an
    exception, so that backward() will raise it: it must then start no collective, as other ranks may not follow.
    """
    with first_of_pass:
        if task not in _callbacks:
            _callbacks[task] = {}
            Variable._execution_engine.queue_callback(functools.partial(_end(), task))
        _callbacks[task][number] = callback


def forget(task: int) -> None:
    """Drop the callbacks of a pass that has ended with an exception."""
    _callbacks.pop(task, None)


@functools.cache
def _end() -> Callable[[int], None]:
    return uncompiled(_ended)


def _ended(task: int) -> None:
    # By number, so that all ranks reduce the gradients of several optimizers in the same order.
    callbacks = iter(sorted(_callbacks.pop(task, {}).items()))
    try:
        for _, callback in callbacks:
            callback(True)
    except BaseException:
        for _, callback in callbacks:
            callback(False)
        raise
