"""Handles: the numbers that Horovod's asynchronous calls return for operations under way."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from hvdkit.engine.api import Engine
from hvdkit.engine.named.operation import Operation

#: The number that poll() and synchronize() take.
Handle = int

_numbers = itertools.count()
#: The operation of each handle; keeps the memory of an operation alive if nobody waits for it.
_under_way: dict[Handle, tuple[Engine, Operation, Callable[[Operation], Any]]] = {}


def make_handle(engine: Engine, operation: Operation, finish: Callable[[Operation], Any]) -> Handle:
    """Make a handle for an operation. finish: converts the operation to the result of synchronize()."""
    handle = next(_numbers)
    _under_way[handle] = (engine, operation, finish)
    return handle


def poll(handle: int) -> bool:
    """Return whether the operation is complete, so that synchronize() returns at once; True for an old handle.

    Never blocks, and makes progress on the operation. Raises RankLostError if a rank has died.
    """
    found = _under_way.get(handle)
    if found is None:
        return True
    engine, operation, _ = found
    if not operation.done:
        engine.drive()
    return operation.done


def synchronize(handle: int) -> Any:
    """Wait until the operation is complete and return its result: the result of the call without _async.

    A second call for the same handle, or an unknown handle, returns None, as in Horovod.
    Raises HorovodInternalError if the operation failed.
    """
    found = _under_way.get(handle)
    if found is None:
        return None
    engine, operation, finish = found
    try:
        engine.wait(operation)
    finally:
        del _under_way[handle]
    return finish(operation)
