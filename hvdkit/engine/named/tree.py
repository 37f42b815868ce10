"""Ranks as a tree, so that none has to hear or tell more than a few others; and sets of ranks as bits of a number."""

from __future__ import annotations

from dataclasses import dataclass

#: Children of a rank: 585 ranks are three steps from the root at most, 4681 four; up to 9 hear it from the root itself.
FANOUT = 8


@dataclass(frozen=True)
class Place:
    """Where a rank stands. A part of the tree is a run of ranks, the first of which speaks for all of them.

    stop: its part is from itself up to that rank. parent: -1 for the root. children: (first, stop) of each one's part.
    """

    rank: int
    stop: int
    parent: int
    children: tuple[tuple[int, int], ...]


def place_in_tree(rank: int, size: int, fanout: int = FANOUT) -> Place:
    """The place of one of `size` ranks, of which 0 is the root."""
    parent, first, stop = -1, 0, size
    while True:
        children = _split(first + 1, stop, fanout)
        if rank == first:
            return Place(rank, stop, parent, children)
        parent, (first, stop) = first, next(one for one in children if one[0] <= rank < one[1])


def _split(first: int, stop: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Runs of equal length, the first ones one longer where it does not divide."""
    each, more = divmod(stop - first, parts)
    runs, at = [], first
    for part in range(min(parts, stop - first)):
        end = at + each + (part < more)
        runs.append((at, end))
        at = end
    return tuple(runs)


def run_of(first: int, stop: int) -> int:
    """The set of the ranks from `first` up to `stop`."""
    return (1 << stop) - (1 << first)


def ranks_in(ranks: int) -> list[int]:
    """The ranks of a set, rising."""
    return [rank for rank in range(ranks.bit_length()) if ranks >> rank & 1]


def first_in(ranks: int) -> int:
    """The lowest rank of a set that is not empty."""
    return (ranks & -ranks).bit_length() - 1
