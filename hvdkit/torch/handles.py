"""Operations under way, as the numbers that Horovod's asynchronous calls return."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from hvdkit.engine.execution import Operation
from hvdkit.engine.named import NamedEngine


class Handle(int):
    """A number that poll() and synchronize() take."""

    operation: Operation
    engine: NamedEngine
    finish: Callable[[Operation], Any]


_numbers = itertools.count()
_under_way: dict[int, Handle] = {}  # also keeps the memory of operations alive that nobody waits for


def make_handle(engine: NamedEngine, operation: Operation, finish: Callable[[Operation], Any]) -> Handle:
    """A handle for an operation. finish: makes of it what synchronize() returns."""
    handle = Handle(next(_numbers))
    handle.engine, handle.operation, handle.finish = engine, operation, finish
    _under_way[handle] = handle
    return handle


def poll(handle: int) -> bool:
    """Is the operation done, so that synchronize() returns at once? True for a handle that has been synchronized.

    Never waits, and helps the operation on. Raises RankLostError if a rank has died.
    """
    found = _under_way.get(int(handle))
    if found is None:
        return True
    if not found.operation.done:
        found.engine.drive()
    return found.operation.done


def synchronize(handle: int) -> Any:
    """Wait for the operation, and return its result: a tensor, a list of them for a group, or what the call says.

    The result is given once; later, and for a number that is no handle, None, as in Horovod.
    Raises HorovodInternalError if the operation failed.
    """
    found = _under_way.get(int(handle))
    if found is None:
        return None
    try:
        found.engine.wait(found.operation)
    finally:
        del _under_way[found]
    return found.finish(found.operation)
