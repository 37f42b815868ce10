"""Hosts and slots: what a hostfile may say, and what is said about one that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused import refused

from hvdkit.errors import HostfileError, LaunchError
from hvdkit.launch.hostfiles import Host, find_hostfile, parse_host_list, parse_hostfile
from hvdkit.launch.plan.job import plan_ranks


def test_a_hostfile_in_open_mpis_dialect_is_read_in_order() -> None:
    text = """\
    # the big ones
    node1 slots=4 max_slots=8

    node2 slots = 4   # spaces, and a comment
    \tnode3\tslots=2\r
    bob@node4 slots=1
    10.0.0.7
    [fe80::1%eth0] slots=3
    """
    assert parse_hostfile(text, "hosts").hosts == (
        Host("node1", 4, 8),
        Host("node2", 4),
        Host("node3", 2),
        Host("node4", 1, user="bob"),
        Host("10.0.0.7", None),
        Host("fe80::1%eth0", 3),
    )


def test_repeated_hosts_add_up_and_a_bare_one_counts_one_each_time() -> None:
    found = parse_hostfile("a slots=2\nb\na slots=3\nb\nb\nc", "hosts")
    assert found.hosts == (Host("a", 5), Host("b", 3), Host("c", None))


def test_every_problem_of_a_file_is_reported_with_its_line_and_its_cure() -> None:
    text = "good slots=1\nnode1:4\n\nnode2 slots=four\nnode3 cores=2\n-oProxyCommand=x\nnode4 slots=4 max_slots=2\n"
    with pytest.raises(HostfileError) as caught:
        parse_hostfile(text, "hosts.txt")
    lines = str(caught.value).splitlines()
    assert [line.partition(" ")[0] for line in lines] == [f"hosts.txt:{n}:" for n in (2, 4, 5, 6, 7)] + ["hosts.txt:"]
    assert all(line.endswith(".") and not line.endswith("..") for line in lines)
    assert "node1 slots=4" in lines[0]
    assert "'four' is not a number" in lines[1]
    assert "Leave it out" in lines[2]
    assert "read it as an option" in lines[3]
    assert "below slots=4" in lines[4]
    assert "the format of Open MPI" in lines[5]
    assert "--hostfile-format" in lines[5]


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n   # here\n"])
def test_a_file_without_a_host_is_refused(text: str) -> None:
    with refused("hostfile-invalid", names=["hosts: has no hosts"], kind=HostfileError):
        parse_hostfile(text, "hosts")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"node1\xff\xfe slots=1")
    for path, why in ((tmp_path / "none", "No such file"), (tmp_path, "directory"), (binary, "not a text file")):
        with refused("hostfile-invalid", names=[f"{path}: ", why], kind=HostfileError):
            find_hostfile(str(path))


HOSTILE = [
    "-oProxyCommand=x",
    "a b",
    "a;reboot",
    "$(id)",
    "`id`",
    "a\x00b",
    "a'b",
    "böse",
    "-",
    ".",
    "a@@b",
    "@a",
    "a-",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with refused("hosts-invalid", names=[f"-H {name!r}: "]):
        parse_host_list(name)
    with refused("hostfile-invalid", names=["hosts:1: "], kind=HostfileError):
        parse_hostfile(f"{name} slots=1", "hosts")


@given(st.text(max_size=200))
def test_any_text_is_a_list_of_hosts_or_a_hostfile_error(text: str) -> None:
    try:
        hosts = parse_hostfile(text, "hosts").hosts
    except HostfileError as error:
        assert error.problems
    else:
        assert all(
            host.name and not host.name.startswith("-") and not set(" ;$`'\"\n\0") & {*host.name} for host in hosts
        )


@given(st.text(alphabet="ab1-.:@[],= %\n", max_size=40))
def test_any_list_after_h_is_hosts_or_a_launch_error(text: str) -> None:
    try:
        assert parse_host_list(text)
    except LaunchError as error:
        assert error.code == "hosts-invalid" and repr(text) in str(error)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 999)), min_size=1, max_size=8))
def test_a_written_hostfile_is_read_back_with_all_its_slots(pairs: list[tuple[str, int]]) -> None:
    hosts = parse_hostfile("".join(f"{name} slots={slots}\n" for name, slots in pairs), "hosts").hosts
    assert sum(host.slots or 0 for host in hosts) == sum(slots for _, slots in pairs)
    assert [host.name for host in hosts] == list(dict.fromkeys(name for name, _ in pairs))
    assert parse_host_list(",".join(f"{name}:{slots}" for name, slots in pairs)) == hosts


def test_a_list_after_h_has_one_slot_a_host_unless_it_says_more() -> None:
    assert parse_host_list("a,b:2, bob@c:3,[::1]:4,a") == (
        Host("a", 2),
        Host("b", 2),
        Host("c", 3, user="bob"),
        Host("::1", 4),
    )


@pytest.mark.parametrize(
    "text", ["", "a,,b", "a:", "a:0", "a:-1", "a:x", "a:1:2", "fe80::1", "[::1", "[::1]4", "a:9999999"]
)
def test_a_wrong_list_after_h_is_refused(text: str) -> None:
    with refused("hosts-invalid", names=[f"-H {text!r}: "]):
        parse_host_list(text)


def test_ranks_are_as_many_as_asked_for_or_as_there_are_slots() -> None:
    hosts = (Host("a", 2), Host("b", None))
    assert plan_ranks(None, hosts, {"b": 8}) == 10
    assert plan_ranks(3, hosts, {}) == 3
    assert plan_ranks(40, hosts, {}) == 40  # nobody here knows b's cores: mpirun will tell
    assert plan_ranks(7, (), {}) == 7
    with refused("not-enough-slots", names=["-np 11", "10 ranks", "ask Slurm for more"]):
        plan_ranks(11, hosts, {"b": 8}, more_slots_hint="ask Slurm for more")
    with refused("not-enough-slots", names=["-np 11", "10 slots of a:2, b:8"]):
        plan_ranks(11, hosts, {"b": 8})
    with refused("np-missing", names=["-np"]):
        plan_ranks(None, (), {})
    with refused("np-invalid", names=["-np 0"]):
        plan_ranks(0, (), {})
