"""Names folded by their numbers, as Slurm writes them."""

from __future__ import annotations

import pytest
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.launch.hostfiles.names import MOST_HOSTS, expand, fold, split_list

EXPANDED = {
    "login1": ["login1"],
    "nid[001-004]": ["nid001", "nid002", "nid003", "nid004"],
    "nid[001-003,007]": ["nid001", "nid002", "nid003", "nid007"],
    "n[8-11]": ["n8", "n9", "n10", "n11"],
    "n[08-10]": ["n08", "n09", "n10"],
    "n[099-101]": ["n099", "n100", "n101"],
    "n[7,1-2]": ["n7", "n1", "n2"],  # in this order: tasks are counted along it
    "rack[1-2]n[1-2]": ["rack1n1", "rack1n2", "rack2n1", "rack2n2"],
    "n[1-2]-ib": ["n1-ib", "n2-ib"],
    "n[5]": ["n5"],
}


@pytest.mark.parametrize("folded", EXPANDED)
def test_ranges_are_written_out(folded: str) -> None:
    assert expand(folded) == EXPANDED[folded]


@pytest.mark.parametrize(
    "text",
    [
        "n[",
        "n]",
        "n[]",
        "n[1",
        "n1]",
        "n[[1]]",
        "n[a-b]",
        "n[1-]",
        "n[-1]",
        "n[1,]",
        "n[4-1]",
        "n[1-010]",
        "n[1-2-3]",
        "n[1 - 2]",
        "n[٣-٤]",
        "n[1-99999999999]",
        "n[1-9999]m[1-9999]",
        "n[1-99999999999999999999]",
    ],
)
def test_brackets_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"[Ww]rite|number|Check"):
        expand(text)


def test_a_list_is_split_at_the_commas_outside_of_brackets() -> None:
    assert split_list("nid[001-004,007],login1") == ["nid[001-004,007]", "login1"]
    assert split_list("a") == ["a"]
    assert split_list("a,,b") == ["a", "", "b"]


@pytest.mark.parametrize("names", [*EXPANDED.values(), ["n01", "n2", "n3"], ["a1", "b1"], ["1", "2"], ["n9", "n010"]])
def test_folded_names_are_written_out_again_in_their_order(names: list[str]) -> None:
    assert [name for part in split_list(fold(names)) for name in expand(part)] == names


def test_names_that_follow_each_other_are_folded() -> None:
    assert fold(["nid001", "nid002", "nid003", "nid007", "login1"]) == "nid[001-003,007],login1"
    assert fold(["n9", "n10", "n08", "n09", "n10"]) == "n[9-10,08-10]"


NAMES = st.builds(
    lambda prefix, number, width: f"{prefix}{number:0{width}d}",
    st.sampled_from(["n", "nid", "rack1-n", ""]),
    st.integers(0, 120),
    st.integers(1, 4),
)


@given(st.lists(st.one_of(NAMES, st.sampled_from(["login", "head-a"])), min_size=1, max_size=30))
def test_folding_keeps_every_name_and_their_order(names: list[str]) -> None:
    assert [name for part in split_list(fold(names)) for name in expand(part)] == names


RANGES = st.lists(
    st.integers(0, 300).flatmap(lambda a: st.integers(a, a + 30).map(lambda b: (a, b))), min_size=1, max_size=4
)


@given(RANGES, st.integers(1, 4), st.sampled_from(["", "-ib", "x"]))
def test_clustershell_finds_the_same_hosts(ranges: list[tuple[int, int]], width: int, suffix: str) -> None:
    inside = ",".join(f"{a:0{width}d}-{b:0{width}d}" for a, b in ranges)
    text = f"nid[{inside}]{suffix}"
    try:
        theirs = set(NodeSet(text, resolver=RESOLVER_NOGROUP))
    except Exception:  # it refuses widths that change inside a range, which ours writes as Slurm does
        assert any(len(f"{a:0{width}d}") != len(f"{b:0{width}d}") for a, b in ranges)
    else:
        assert set(expand(text)) == theirs


@given(st.lists(NAMES, min_size=1, max_size=30, unique=True))
def test_clustershell_understands_what_is_folded(names: list[str]) -> None:
    assert set(NodeSet(fold(names), resolver=RESOLVER_NOGROUP)) == set(names)


@given(st.text(alphabet="n01-9[],", max_size=20))
def test_any_text_is_names_or_a_value_error(text: str) -> None:
    try:
        names = expand(text)
    except ValueError as problem:
        assert str(problem)
    else:
        assert 1 <= len(names) <= MOST_HOSTS
