"""Ask a store of another process, which may be stopped: torch's own wait for an answer cannot be watched or ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from hvdkit.errors import TransportError
from hvdkit.transport.polling import look

Answer = TypeVar("Answer")

_LOOK_S = 0.1  # between two calls of what watches this thread's waits
_ANSWER_S = 5.0  # for an answer, also where the deadline is over


def ask_rank_0(store: Any, call: Callable[..., Answer], *arguments: Any, deadline: float) -> Answer:
    """Return call(*arguments), a method of rank 0's store, or raise what it raises.

    deadline: on the clock of time.monotonic(). Raises TransportError if there is no answer by then; the store cannot be
    used any more.
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
            over.set()

    began = time.monotonic()
    threading.Thread(target=wait_for_answer, name="hvdkit-rank-0s-store", daemon=True).start()
    while not over.wait(_LOOK_S):
        look()
        waited = time.monotonic() - began
        if waited > _ANSWER_S and began + waited > deadline:
            raise TransportError(
                f"Rank 0 does not answer while the ranks connect: its store at {store.host}:{store.port} has been "
                f"silent for {waited:.0f} s. Its process or its host is stopped (SIGSTOP, a debugger, a suspended "
                "machine), or the network between the hosts is cut. Look at the process of rank 0."
            )
    if errors:
        raise errors[0]
    return answers[0]
