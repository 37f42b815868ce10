"""A thread that inspects device groups, because no thread waits for their operations."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

_WATCH_S = 0.5


class Inspected(Protocol):
    """A device group."""

    def inspect(self, groups: Sequence[Any]) -> None:
        """Check for lost ranks while operations are in progress. groups: all that are watched."""


GroupType = TypeVar("GroupType", bound=Inspected)


class GroupWatch(Generic[GroupType]):
    """Calls inspect() of each group every half second, until the group is garbage-collected.

    name: of the thread, which starts with the first group.
    prepare: called by the thread at its start.
    """

    def __init__(self, name: str, prepare: Callable[[], None] = lambda: None) -> None:
        self._name, self._prepare = name, prepare
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Reset the state, also after a fork, because the thread runs only in the parent."""
        self._groups: weakref.WeakSet[GroupType] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, group: GroupType) -> None:
        """Watch a group."""
        with self._lock:
            self._groups.add(group)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        self._prepare()
        pause = threading.Event()
        while not pause.wait(_WATCH_S):
            with self._lock:
                groups = list(self._groups)
            for group in groups:
                group.inspect(groups)
