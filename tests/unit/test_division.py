"""Ranks divided into groups, by numbers alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.transport.division import check_groups, divide_by_node, find_group, group_by_color, keep_places

COLORS = st.lists(st.tuples(st.none() | st.integers(0, 3), st.integers(-2, 2)), max_size=12)


@given(COLORS)
def test_ranks_of_a_color_are_one_group_in_the_order_of_their_keys(pairs: list[tuple[int | None, int]]) -> None:
    groups = group_by_color([color for color, _ in pairs], [key for _, key in pairs])
    for rank, (color, _) in enumerate(pairs):
        number = find_group(groups, rank)
        assert (number is None) == (color is None)
        if number is not None:
            assert {pairs[other][0] for other in groups[number]} == {color}
    assert sum(map(len, groups)) == sum(color is not None for color, _ in pairs)
    for group in groups:
        assert list(group) == sorted(group, key=lambda rank: (pairs[rank][1], rank))
    check_groups(groups, len(pairs))


def test_the_axes_of_a_mesh() -> None:
    assert group_by_color([rank // 2 for rank in range(4)]) == [[0, 1], [2, 3]]
    assert group_by_color([rank % 2 for rank in range(4)]) == [[0, 2], [1, 3]]


def test_a_host_and_the_ranks_of_the_same_place_on_each() -> None:
    assert divide_by_node([0, 1, 0, 0]) == ([[0, 2, 3], [1]], [[0, 1], [2], [3]])
    assert divide_by_node([7, 7, 3, 3]) == ([[2, 3], [0, 1]], [[0, 2], [1, 3]])


def test_a_rank_keeps_its_place_on_its_host_where_there_is_one() -> None:
    assert keep_places([0, 1, 0, 1], [-1] * 4) == [0, 0, 1, 1], "first world: in rank order"
    assert keep_places([0, 0, 0, 0], [1, 2, 3, -1]) == [1, 2, 3, 0], "the replacement gets the lost rank's"
    assert keep_places([0, 0, 0], [1, 2, 3]) == [1, 2, 0], "there is no fourth place any more"
    assert keep_places([0, 0, 0], [1, 1, -1]) == [1, 0, 2], "two have had the same one"
    assert keep_places([5, 0, 5], [1, 1, 0]) == [1, 0, 0], "each host by itself"


@pytest.mark.parametrize("groups", [[[]], [[0, 0]], [[0], [0]], [[4]], [[-1]]])
def test_what_are_no_groups_of_these_ranks_is_refused(groups: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="from 0 to 3"):
        check_groups(groups, 4)
