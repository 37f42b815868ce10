"""The cores of a rank that replaces a lost one: those that it had, as the others stay on theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Orders = Mapping[int, Mapping[str, Any]]


def take_free_shares(planned: Orders, held: Orders) -> dict[int, Mapping[str, Any]]:
    """Give new ranks of a host the shares of its cores that no running rank has.

    planned: by rank, what plan_cores would order for all ranks of the host as they are now. held: what the ranks that
    run have been ordered before; a process keeps its cores and its GPU. If they come from several divisions of the
    host, or all shares are taken, as on a host that gets more ranks than it began with, new ranks get what is planned.
    """
    running = {rank: held[rank] for rank in planned if rank in held}
    divisions = [{word: value for word, value in order.items() if word != "at"} for order in running.values()]
    if not running or "divide" not in divisions[0] or any(division != divisions[0] for division in divisions):
        return {rank: running.get(rank, order) for rank, order in planned.items()}
    free = iter(sorted(set(range(divisions[0]["ranks"])) - {order["at"] for order in running.values()}))
    orders: dict[int, Mapping[str, Any]] = {}
    for rank, order in planned.items():
        at = None if rank in running else next(free, None)
        orders[rank] = running.get(rank, order) if at is None else {**divisions[0], "at": at}
    return orders
