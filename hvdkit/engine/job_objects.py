"""Python objects between the ranks of the job, as every adapter offers them."""

from __future__ import annotations

from typing import TypeVar

from hvdkit.engine import objects
from hvdkit.engine import runtime as engine
from hvdkit.engine.process_sets import ProcessSet, global_process_set

T = TypeVar("T")


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """Give every rank a copy of root's object (anything that can be pickled); what the others pass does not count.

    Raises ValueError for a root that does not exist, NotInitializedError before init().
    """
    made = engine.runtime("broadcast_object()")
    transport, ranks = process_set.group("broadcast_object()").transport, process_set.ranks or []
    if root_rank not in ranks:
        raise ValueError(f"root_rank is {root_rank}; the ranks of {process_set!r} are {ranks}.")
    with made.lock:
        return objects.broadcast_object(transport, obj, ranks.index(root_rank))


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """Give every rank of the set the list of its ranks' objects (anything that can be pickled), in rank order.

    Raises NotInitializedError before init().
    """
    made = engine.runtime("allgather_object()")
    with made.lock:
        return objects.allgather_object(process_set.group("allgather_object()").transport, obj)
