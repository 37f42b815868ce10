"""Divides ranks into groups, as for MPI_Comm_split, by pure functions of numbers that all ranks know."""

from __future__ import annotations

from collections.abc import Sequence

#: Disjoint groups of ranks; a rank's index in its group is its number there.
Groups = Sequence[Sequence[int]]


def check_groups(groups: Groups, size: int) -> None:
    """Raise ValueError unless the groups contain only ranks from 0 to size - 1, each at most once."""
    ranks = [rank for group in groups for rank in group]
    if not all(groups) or len(set(ranks)) != len(ranks) or not all(0 <= rank < size for rank in ranks):
        raise ValueError(
            f"groups must consist of different ranks from 0 to {size - 1}, not {[list(group) for group in groups]}"
        )


def find_group(groups: Groups, rank: int) -> int | None:
    """Return the index of a rank's group; None if it is in none."""
    return next((number for number, group in enumerate(groups) if rank in group), None)


def group_by_color(colors: Sequence[int | None], keys: Sequence[int] | None = None) -> list[list[int]]:
    """Return the ranks of each color, in rising order of colors; within a color by key, then by rank.

    This is the order of MPI_Comm_split. colors: one for each rank; None for no group. keys: one for each rank; None if
    all are equal.
    """
    order = sorted(range(len(colors)), key=lambda rank: (0 if keys is None else keys[rank], rank))
    present = sorted({color for color in colors if color is not None})
    return [[rank for rank in order if colors[rank] == color] for color in present]


def keep_places(nodes: Sequence[int], wished: Sequence[int]) -> list[int]:
    """Return a local rank for each rank: the wished one if it is below the host's number of ranks and still free.

    nodes: the host number of each rank. wished: the wished local rank of each rank; -1 for none. Lower ranks choose
    first; ranks without a fulfilled wish get the free local ranks, in rank order.
    """
    places = [-1] * len(nodes)
    for ranks in group_by_color(nodes):
        free = list(range(len(ranks)))
        for rank in ranks:
            if wished[rank] in free:
                places[rank] = wished[rank]
                free.remove(wished[rank])
        for rank in ranks:
            if places[rank] < 0:
                places[rank] = free.pop(0)
    return places


def divide_by_node(nodes: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ranks of each host, and the ranks with equal positions on their hosts, all in rank order.

    nodes: the host number of each rank. If hosts have different numbers of ranks, the later groups of the second kind
    are shorter.
    """
    places = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    return group_by_color(nodes), group_by_color(places)
