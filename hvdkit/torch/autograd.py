"""The end of a backward pass: one callback of autograd for all optimizers that take part in it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch
from torch.autograd import Variable

from hvdkit.torch.uncompiled import uncompiled

NO_TASK = -1

#: Held by a hook that is the first one of a pass: autograd runs the hooks of each device in a thread of its own.
first_of_pass = threading.RLock()

#: Of each pass under way what to call at its end, by the numbers of the optimizers; see when_backward_ends.
_callbacks: dict[int, dict[int, Callable[[bool], None]]] = {}

#: autograd's number of the backward pass that runs in this thread, rising; NO_TASK outside of one. Asked by every hook.
current_task: Callable[[], int] = torch._C._current_graph_task_id


def when_backward_ends(task: int, number: int, callback: Callable[[bool], None]) -> None:
    """Have optimizer `number` called back when the running pass `task` has ended without an exception.

    Called from inside of the pass. callback: gets True; False if the callback of an optimizer before has raised an
    exception, so that backward() will raise it: nothing collective may follow, as the other ranks may still be there.
    """
    with first_of_pass:
        if task not in _callbacks:
            _callbacks[task] = {}
            Variable._execution_engine.queue_callback(functools.partial(_end(), task))
        _callbacks[task][number] = callback


def forget(task: int) -> None:
    """The pass has ended with an exception."""
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
