"""Calls a store of another process with a timeout; torch's own wait for a stopped process cannot be interrupted."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from hvdkit.errors import TransportError
from hvdkit.transport.polling import check_wait

Answer = TypeVar("Answer")

_LOOK_S = 0.1  # interval between two calls of look()
_ANSWER_S = 5.0  # shortest timeout of an answer, also after the deadline
_EXIT_S = 1.0  # timeout of all calls still in progress when Python ends
_asking: set[threading.Thread] = set()


def request_from_rank_0(store: Any, call: Callable[..., Answer], *arguments: Any, deadline: float) -> Answer:
    """Call a method of rank 0's store; see wait_for_store()."""
    return wait_for_store(f"{store.host}:{store.port}", call, *arguments, deadline=deadline)


def wait_for_store(
    place: str, call: Callable[..., Answer], *arguments: Any, deadline: float, owner: str = "Rank 0"
) -> Answer:
    """Return call(*arguments), which queries a store, or raise its exception.

    place: the address of the store, for the message.
    call: a method of the store.
    arguments: the arguments of `call`.
    deadline: on the clock of time.monotonic(); at least 5 s are allowed.
    owner: the process that serves the store, for the message.
    Raises TransportError if no answer has come by the deadline; the store cannot be used any more then.
    """
    answers: list[Answer] = []
    errors: list[Exception] = []
    over = threading.Event()

    def wait_for_answer() -> None:
        try:
            answers.append(call(*arguments))
        except Exception as error:
            errors.append(error)
        finally:
            _asking.discard(threading.current_thread())
            over.set()

    began = time.monotonic()
    thread = threading.Thread(target=wait_for_answer, name="hvdkit-store", daemon=True)
    _asking.add(thread)
    thread.start()
    while not over.wait(_LOOK_S):
        check_wait()
        waited = time.monotonic() - began
        if waited > _ANSWER_S and began + waited > deadline:
            raise TransportError(
                f"{owner} does not answer while the ranks connect: its store at {place} has been silent for "
                f"{waited:.0f} s. Its process or its host is stopped (SIGSTOP, a debugger, a suspended machine), or "
                f"the network between the hosts is cut. Look at the process of {owner[0].lower()}{owner[1:]}."
            )
    if errors:
        raise errors[0]
    return answers[0]


@atexit.register
def _wait_for_answers() -> None:
    """Wait for calls in progress: a call of torch that returns after Python has ended kills the process by SIGABRT."""
    deadline = time.monotonic() + _EXIT_S
    for thread in tuple(_asking):
        thread.join(max(0.0, deadline - time.monotonic()))
