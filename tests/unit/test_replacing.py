"""Who starts ranks in place of those that died: a plan, for any hosts."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hvdkit.elastic.replacing import HostSlot, plan_replacements

PLACES = st.lists(
    st.builds(HostSlot, st.sampled_from("abc"), st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=8
)


@given(PLACES, st.integers(0, 8))
def test_no_host_gets_more_than_it_has_room_for_and_all_that_can_come_do(places: list[HostSlot], most: int) -> None:
    counts = plan_replacements(places, most)
    hosts = [place.host for place in places]
    there = Counter(hosts)
    died = {host: max(0, max(p.ranks for p in places if p.host == host) - there[host]) for host in there}
    free = {host: max(0, max(p.slots for p in places if p.host == host) - there[host]) for host in there}
    room = {host: max(died[host], free[host]) for host in there}
    given = dict.fromkeys(there, 0)
    for rank, count in enumerate(counts):
        assert count == 0 or hosts.index(hosts[rank]) == rank
        given[hosts[rank]] += count
    assert all(0 <= given[host] <= room[host] for host in there)
    assert sum(counts) == min(most, sum(room.values()))
    # Nobody comes to another host while there is a place where one has died.
    assert all(given[h] <= died[h] for h in there) or all(given[h] >= died[h] for h in there)
