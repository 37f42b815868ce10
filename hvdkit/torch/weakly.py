"""Actions of an object that the engine keeps, without keeping the object alive."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from hvdkit.engine.named.operation import Action
from hvdkit.transport.api import Transport

Owner = TypeVar("Owner")


def weakly(
    held: weakref.ref[Owner], method: Callable[[Owner, Transport, Sequence[int]], None]
) -> Callable[[], Action | None]:
    """Return a function that binds the method to the object, or returns None after the object is gone."""

    def find() -> Action | None:
        owner = held()
        return None if owner is None else functools.partial(method, owner)

    return find
