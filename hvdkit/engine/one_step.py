"""Checks that steps on the gradients of the same tensors do not overlap on a rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hvdkit.errors import HorovodInternalError

_SHOWN = 3


class OneStep:
    """Detects two overlapping steps on the same tensors, for example in two threads.

    Ranks may begin such steps in different orders, and would then add gradients of different losses. So both steps, and
    all later steps, raise HorovodInternalError.

    names: of the tensors.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._working = threading.Lock()
        self._program: object = None
        self._failed = ""

    @contextmanager
    def part(self, program: object, *, first: bool, last: bool) -> Iterator[None]:
        """Enter a context for a part of a step.

        program: identifies the step; the same for all its parts. first, last: Is it the first, or last, part of a step?
        A first part is allowed after a step that an exception has ended.
        """
        if not self._working.acquire(blocking=False):
            self._fail()
        try:
            if not first and self._program is not program:
                self._fail()
            self._check()
            self._program = program
            yield
            self._check()
            if last:
                self._program = None
        finally:
            self._working.release()

    def _fail(self) -> None:
        names = ", ".join(self._names[:_SHOWN]) + (", ..." if self._names[_SHOWN:] else "")
        self._failed = (
            f"Gradients of the same variables ({names}) are being reduced twice at once on this rank: in two threads, "
            f"or by two calls of one tf.function in one run of a session. Other ranks may have added gradients of the "
            f"one to those of the other. Have one wait for the other, in the same order on all ranks (in a session by "
            f"tf.control_dependencies, or by two tf.functions of different names)."
        )
        self._check()

    def _check(self) -> None:
        if self._failed:
            raise HorovodInternalError(self._failed)
