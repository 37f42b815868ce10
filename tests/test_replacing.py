"""Who starts ranks in place of those that died: a plan, for any hosts."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hvdkit.elastic.replacing import plan_replacements

PLACES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4)), min_size=1, max_size=8)


@given(PLACES, st.integers(0, 8))
def test_no_host_gets_more_than_it_had_and_all_that_can_come_do(places: list[tuple[str, int]], most: int) -> None:
    counts = plan_replacements(places, most)
    hosts = [host for host, _ in places]
    there = Counter(hosts)
    slots = {host: max(number for name, number in places if name == host) for host in there}
    missing = {host: max(0, slots[host] - there[host]) for host in there}
    for rank, count in enumerate(counts):
        assert count == 0 or hosts.index(hosts[rank]) == rank
        assert 0 <= count <= missing[hosts[rank]]
    assert sum(counts) == min(most, sum(missing.values()))
