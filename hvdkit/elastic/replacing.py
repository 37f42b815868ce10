"""How many ranks each host starts in the place of those that died."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Where a rank is: its host, how many ranks that had at first, and for how many it has slots."""

    host: str
    ranks: int
    slots: int


def plan_replacements(places: Sequence[Place], most: int) -> list[int]:
    """How many ranks each of those that are left starts, on its own host.

    places: by rank. most: that are started in all. The first rank of each host starts what is missing there, and where
    there are not enough of these places, in slots that were free from the beginning; where no rank is left none is
    started.
    """
    counts = [0] * len(places)
    hosts = [place.host for place in places]
    for room in (_ranks, _slots):
        for rank, host in enumerate(hosts):
            if hosts.index(host) == rank:
                most_here = max(room(place) for place in places if place.host == host)
                missing = most_here - hosts.count(host) - counts[rank]
                counts[rank] += max(0, min(missing, most - sum(counts)))
    return counts


def _ranks(place: Place) -> int:
    return place.ranks


def _slots(place: Place) -> int:
    return place.slots
