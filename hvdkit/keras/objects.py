"""Python objects between ranks, after the steps that are under way."""

from __future__ import annotations

from typing import TypeVar

from hvdkit.engine import job_objects
from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.keras.backends import settle

T = TypeVar("T")


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """Give every rank a copy of root's object (anything that can be pickled); what the others pass does not count.

    Raises ValueError for a root that does not exist, NotInitializedError before init().
    """
    settle()
    return job_objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: T, name: str | None = None) -> list[T]:
    """Give every rank the list of all ranks' objects (anything that can be pickled), in rank order.

    Raises NotInitializedError before init().
    """
    settle()
    return job_objects.allgather_object(obj, name)
