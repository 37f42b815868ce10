"""Dividing ranks into groups, for MPI_Comm_split and its like: pure functions of numbers that all ranks know."""

from __future__ import annotations

from collections.abc import Sequence

#: Disjoint groups of ranks; a rank's place in its group is its number there.
Groups = Sequence[Sequence[int]]


def check_groups(groups: Groups, size: int) -> None:
    """Raise ValueError unless the groups are made of ranks from 0 to size - 1, each at most once."""
    ranks = [rank for group in groups for rank in group]
    if not all(groups) or len(set(ranks)) != len(ranks) or not all(0 <= rank < size for rank in ranks):
        raise ValueError(
            f"groups must consist of different ranks from 0 to {size - 1}, not {[list(group) for group in groups]}"
        )


def find_group(groups: Groups, rank: int) -> int | None:
    """The number of the group that a rank is in; None if it is in none."""
    return next((number for number, group in enumerate(groups) if rank in group), None)


def group_by_color(colors: Sequence[int | None], keys: Sequence[int] | None = None) -> list[list[int]]:
    """The ranks of each color, colors rising, ordered by key and then by rank, as MPI_Comm_split has it.

    colors, keys: of each rank. A color of None is no group's.
    """
    order = sorted(range(len(colors)), key=lambda rank: (0 if keys is None else keys[rank], rank))
    present = sorted({color for color in colors if color is not None})
    return [[rank for rank in order if colors[rank] == color] for color in present]


def keep_places(nodes: Sequence[int], wished: Sequence[int]) -> list[int]:
    """A place on its host for each rank, from 0: the wished one if the host has it and no lower rank does.

    nodes: of each rank, a number of its host. wished: -1 for no wish. The others get the places that are left, in rank
    order.
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
    """The ranks of each host, and the ranks that have the same place on their hosts, all in rank order.

    nodes: of each rank, a number of its host. The later ones of the second groups are shorter where hosts have
    different numbers of ranks.
    """
    places = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    return group_by_color(nodes), group_by_color(places)
