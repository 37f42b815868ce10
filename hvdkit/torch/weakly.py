"""Actions of an object that the engine keeps, and that must not keep the object."""

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
    """A function that binds the method to the object, or returns None when the object is gone."""

    def find() -> Action | None:
        owner = held()
        return None if owner is None else functools.partial(method, owner)

    return find
