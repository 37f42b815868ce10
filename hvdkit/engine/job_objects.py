"""Python objects between the ranks of the job, as every adapter offers them."""

from __future__ import annotations

from typing import TypeVar

from hvdkit.engine.groups import ProcessSet, global_process_set, group_of
from hvdkit.engine.named.submit import collective_step, root_options
from hvdkit.transport.small_collectives import broadcast_bytes, gather_bytes, pack, unpack

T = TypeVar("T")


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """Return a copy of the root's object on every rank; the objects of the other ranks are ignored.

    obj: anything that can be pickled; the root gets its own object back.
    root_rank: a rank number of the world, also with a process set.
    name: for errors and reports, the same on all ranks.
    process_set: the ranks that take part.
    Raises ValueError for a root that does not exist and on a rank outside the set; NotInitializedError before
    init(); HorovodInternalError if a rank calls another operation instead, has joined or has left.
    """
    group = group_of(process_set, "broadcast_object()")
    options = root_options(process_set, root_rank, "broadcast_object()")
    root = (process_set.ranks or []).index(root_rank)
    data = pack(obj) if group.transport.rank == root else b""
    sent = collective_step(
        group.engine,
        "broadcast_object",
        lambda transport, _: broadcast_bytes(transport, data, root),
        name=name or "",
        options=options,
    )
    return obj if group.transport.rank == root else unpack(sent)


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """Return the list of all ranks' objects, in rank order, on every rank of the set.

    obj: anything that can be pickled. name: for errors and reports, the same on all ranks. process_set: the ranks that
    take part.
    Raises NotInitializedError before init(); HorovodInternalError if a rank calls another operation instead, has joined
    or has left.
    """
    group = group_of(process_set, "allgather_object()")
    data = pack(obj)
    gathered = collective_step(
        group.engine, "allgather_object", lambda transport, _: gather_bytes(transport, data), name=name or ""
    )
    return [unpack(each) for each in gathered]
