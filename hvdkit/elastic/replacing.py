"""Plans replacements: how many ranks each rank starts on its host to replace those that died."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class HostSlot(NamedTuple):
    """A rank's host, with its initial number of ranks and its number of slots."""

    host: str
    ranks: int
    slots: int


def plan_replacements(places: Sequence[HostSlot], most: int) -> list[int]:
    """Return how many ranks each surviving rank starts on its own host.

    places: of each surviving rank. most: limit of the total number of ranks started. The first rank of each host
    replaces the ranks that died there. If these are fewer than `most`, it also fills slots that were free from the
    beginning. No rank is started on a host without a surviving rank.
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


def _ranks(place: HostSlot) -> int:
    return place.ranks


def _slots(place: HostSlot) -> int:
    return place.slots
