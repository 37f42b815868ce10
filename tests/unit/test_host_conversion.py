"""Hosts written in a dialect are read back as they were, or it is said why they cannot be written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import refused

from hvdkit.errors import HostfileError, LaunchError
from hvdkit.launch.hostfiles import DIALECTS, Host, complete_slots, parse_hostfile
from hvdkit.launch.hostfiles.dialects import convert

NAMES = st.one_of(
    st.from_regex(r"[a-z][a-z0-9-]{0,6}[a-z0-9]", fullmatch=True),
    st.builds("nid{:03d}".format, st.integers(0, 30)),
    st.sampled_from(["10.0.0.7", "a.b.example", "n_1", "head-1"]),
)


@st.composite
def host_lists(draw: st.DrawFn, carries: frozenset[str]) -> tuple[Host, ...]:
    """Hosts with nothing but what a dialect can write."""
    names = draw(st.lists(NAMES, min_size=1, max_size=8, unique=True))
    if "ipv6" in carries:
        names += draw(st.lists(st.sampled_from(["fe80::1%eth0", "::1", "2001:db8::2"]), max_size=2, unique=True))
    hosts = []
    for name in names:
        slots = draw(st.integers(1, 40)) if "slots" in carries else None
        most = draw(st.one_of(st.none(), st.integers(40, 99))) if "max_slots" in carries else None
        user = draw(st.sampled_from(["", "alice", "b.o-b_2"])) if "user" in carries else ""
        hosts.append(Host(name, slots, most, user))
    return tuple(hosts)


#: Examples of hypothesis.
NUMBERS = pytest.mark.parametrize("number", [20, pytest.param(100, marks=pytest.mark.slow)])


@NUMBERS
@pytest.mark.parametrize("name", DIALECTS)
def test_what_is_written_in_a_dialect_is_read_back(name: str, number: int) -> None:
    dialect = DIALECTS[name]

    @settings(max_examples=number)
    @given(hosts=host_lists(dialect.carries))
    def check(hosts: tuple[Host, ...]) -> None:
        text, notes = convert(hosts, dialect)
        assert notes == ()
        read = parse_hostfile(text, "hosts", name)
        assert read.hosts == complete_slots(hosts, dialect.default_slots)
        assert read.notes == ()

    check()


@NUMBERS
@pytest.mark.parametrize("name", DIALECTS)
def test_what_is_written_is_recognised_or_it_is_said_that_it_may_mean_something_else(name: str, number: int) -> None:
    dialect = DIALECTS[name]

    @settings(max_examples=number)
    @given(hosts=host_lists(dialect.carries))
    def check(hosts: tuple[Host, ...]) -> None:
        read = parse_hostfile(convert(hosts, dialect)[0], "hosts")
        assert read.hosts == complete_slots(hosts, dialect.default_slots) or "--hostfile-format" in read.notes[0]

    check()


@given(data=st.data())
def test_a_list_goes_through_every_dialect_and_stays_the_same(data: st.DataObject) -> None:
    hosts: Sequence[Host] = data.draw(host_lists(frozenset({"slots"})))
    for dialect in DIALECTS.values():
        if "slots" in dialect.carries:
            assert parse_hostfile(convert(hosts, dialect)[0], "hosts", dialect.name).hosts == hosts


def test_each_dialect_looks_as_its_tool_wants_it() -> None:
    hosts = (Host("n1", 2), Host("n2", 2), Host("n3", 1))
    assert {name: convert(hosts, dialect)[0] for name, dialect in DIALECTS.items()} == {
        "openmpi": "n1 slots=2\nn2 slots=2\nn3 slots=1\n",
        "horovod": "n1 slots=2\nn2 slots=2\nn3 slots=1\n",
        "deepspeed": "n1 slots=2\nn2 slots=2\nn3 slots=1\n",
        "hydra": "n1:2\nn2:2\nn3:1\n",
        "machinefile": "n1:2\nn2:2\nn3:1\n",
        "kubernetes": "n1:2\nn2:2\nn3:1\n",
        "intel": "n1\nn2\nn3\n",
        "plain": "n1\nn2\nn3\n",
        "pbs": "n1\nn1\nn2\nn2\nn3\n",
        "lsf": 'LSB_MCPU_HOSTS="n1 2 n2 2 n3 1"\n',
        "slurm": "SLURM_JOB_NODELIST=n[1-3]\nSLURM_TASKS_PER_NODE=2(x2),1\n",
        "sge": "n1 2 all.q@n1 UNDEFINED\nn2 2 all.q@n2 UNDEFINED\nn3 1 all.q@n3 UNDEFINED\n",
    }


def test_what_would_make_another_job_of_it_is_refused_all_together() -> None:
    hosts = (Host("n1", None), Host("n2", 2, user="alice"), Host("fe80::1", 2))
    names = ["slots of n1", "--slots-per-host", "user of alice@n2", "address fe80::1"]
    with refused("hosts-not-in-format", names=names):
        convert(hosts, DIALECTS["machinefile"])


def test_what_only_limits_is_left_out_and_that_is_said() -> None:
    limited = (Host("n1", 2, 4), Host("n2", 2))
    assert convert(limited, DIALECTS["hydra"])[1] == (
        "max_slots of n1 is left out: the format of MPICH has no field for it.",
    )  # fmt: skip
    (note,) = convert((Host("n1", 2), Host("n2", 2)), DIALECTS["intel"])[1]
    assert "-ppn 2" in note
    (note,) = convert((Host("n1", 2), Host("n2", 3)), DIALECTS["intel"])[1]
    assert "--to machinefile" in note


@given(data=st.data())
def test_users_are_never_dropped_in_silence(data: st.DataObject) -> None:
    hosts = data.draw(host_lists(frozenset({"slots"})))
    hosts = (replace(hosts[0], user="alice"), *hosts[1:])
    for dialect in DIALECTS.values():
        if "slots" not in dialect.carries:
            continue
        try:
            text, _ = convert(hosts, dialect)
        except LaunchError as error:
            assert error.code == "hosts-not-in-format" and "alice" in str(error)
        else:
            assert parse_hostfile(text, "hosts", dialect.name).hosts[0].user == "alice"


SAMPLES = ["n1 slots=4 max_slots=8\nn2\n", "a:4\nb:2 user=c\n", "n[01-03,7]\n", "n1 4 all.q@n1 U\n", "a\na\nb\n",
           'LSB_MCPU_HOSTS="a 2 b 3"\n', "SLURM_JOB_NODELIST=n[1-3]\nSLURM_TASKS_PER_NODE=2(x3)\n",
           "#!/bin/sh\necho a:2\n", "[fe80::1%e]:4\n", "u@a slots = 1 # x\n"]  # fmt: skip


@st.composite
def mutated_samples(draw: st.DrawFn) -> str:
    """A sample with some letters replaced, put in or taken out."""
    text = draw(st.sampled_from(SAMPLES))
    for _ in range(draw(st.integers(1, 5))):
        place = draw(st.integers(0, len(text)))
        new = draw(st.sampled_from([*"[]-,:=@#()'\"\n\t x0 9;$`%\x00é٣", "", "slots", "[1-9]", "-o", "max_slots="]))
        text = text[:place] + new + text[place + draw(st.integers(0, 2)) :]
    return text


@pytest.mark.parametrize("format", ["auto", *DIALECTS])
@given(text=st.one_of(st.text(max_size=120), mutated_samples()))
def test_any_text_is_hosts_or_problems_with_their_lines(format: str, text: str) -> None:
    try:
        found = parse_hostfile(text, "file", format)
    except HostfileError as error:
        assert error.problems
        assert all(line.startswith("file:") for line in str(error).splitlines() if line)
        numbers = [problem.partition(":")[0] for problem in error.problems if not problem.startswith(" ")]
        assert all(1 <= int(number) <= text.count("\n") + 1 for number in numbers)
    else:
        assert found.hosts
        for host in found.hosts:
            assert not set(" ;$`'\"\n\0()[]#=,") & {*host.login}
            assert not host.login.startswith("-")
            assert host.login.isascii()
            assert host.slots is None or host.slots >= 1
