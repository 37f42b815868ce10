"""Every dialect of host lists: what its texts mean, by itself and when nobody says which it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_hostfiles import BAD_HOSTFILES
from refused import refused

from hvdkit.errors import HostfileError
from hvdkit.launch.hostfiles import DIALECTS, Host, find_dialect, find_hostfile, parse_hostfile

SAMPLES = Path(__file__).parents[2] / "hostfiles"

# The ordinary files on which horovodrun 0.28.1 fails, all but the first two: with an IndexError up to the range, then
# with a ValueError. File -> the hosts in it; where another tool would count slots otherwise a note says so.
ORDINARY = {
    "slots": ("node1 slots=4\nnode2 slots=4\n", {"node1": 4, "node2": 4}),
    "repeated host": ("node1 slots=2\nnode2 slots=2\nnode1 slots=2\n", {"node1": 4, "node2": 2}),
    "blank line": ("node1 slots=4\n\nnode2 slots=4\n", {"node1": 4, "node2": 4}),
    "comment line": ("# our hosts\nnode1 slots=4\n", {"node1": 4}),
    "bare host": ("node1\nnode2\n", {"node1": None, "node2": None}),
    "PBS nodefile": ("node1\nnode1\nnode2\nnode2\n", {"node1": 2, "node2": 2}),
    "host:N": ("node1:4\nnode2:4\n", {"node1": 4, "node2": 4}),
    "range": ("nid[001-003]\n", {"nid001": 1, "nid002": 1, "nid003": 1}),
    "max_slots": ("node1 slots=4 max_slots=8\n", {"node1": 4}),
    "comment after it": ("node1 slots=4 # gpu\n", {"node1": 4}),
    "spaces around =": ("node1 slots = 4\n", {"node1": 4}),
    "range with slots": ("nid[001-003] slots=4\n", {"nid001": 4, "nid002": 4, "nid003": 4}),
}
UNSAID = {"bare host", "PBS nodefile", "range"}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_files_are_read_without_naming_the_dialect(name: str) -> None:
    text, expected = ORDINARY[name]
    found = parse_hostfile(text, "hosts")
    assert {host.name: host.slots for host in found.hosts} == expected
    assert bool(found.notes) == (name in UNSAID)
    assert all("--hostfile-format" in note for note in found.notes)


# dialect -> (text, hosts) of what that dialect's tool would read; slots "cores" are None.
MEANINGS: dict[str, list[tuple[str, tuple[Host, ...]]]] = {
    "openmpi": [
        ("a cpu=2\nb count=3\nc slots=1 max-slots=2\n", (Host("a", 2), Host("b", 3), Host("c", 1, 2))),
        ("a\nb slots=2", (Host("a", None), Host("b", 2))),
        ("// a comment\na\na\n", (Host("a", 2),)),
        ("bob@a slots=2\nc username=bob slots=1\n", (Host("a", 2, user="bob"), Host("c", 1, user="bob"))),
        ("10.0.0.7 slots=2\nfe80::1%eth0 slots=3\n", (Host("10.0.0.7", 2), Host("fe80::1%eth0", 3))),
    ],
    "horovod": [
        ("a slots=4\nb slots=2\n", (Host("a", 4), Host("b", 2))),
        ("a:4,b:2,a:1", (Host("a", 5), Host("b", 2))),
    ],
    "hydra": [
        ("a:4\nb\n# no\nc:2 # two\n", (Host("a", 4), Host("b", 1), Host("c", 2))),
        ("a:4 user=bob binding=user:0,1\n", (Host("a", 4, user="bob"),)),
        ("a\na\n[fe80::1]:3\n", (Host("a", 2), Host("fe80::1", 3))),
    ],
    "intel": [("a\nb\na\n", (Host("a", None), Host("b", None)))],
    "machinefile": [("a:4\nb\n", (Host("a", 4), Host("b", 1)))],
    "pbs": [
        ("a\na\nb\nb\n", (Host("a", 2), Host("b", 2))),
        ("a\nb\na\n", (Host("a", 2), Host("b", 1))),
        ("a.site\nb.site\n", (Host("a.site", 1), Host("b.site", 1))),
    ],
    "lsf": [
        ('LSB_MCPU_HOSTS="a 4 b 2"\n', (Host("a", 4), Host("b", 2))),
        ("export LSB_HOSTS='a a b'\n", (Host("a", 2), Host("b", 1))),
        ("a 4 b 2", (Host("a", 4), Host("b", 2))),
        ("a a b", (Host("a", 2), Host("b", 1))),
        ("a\na\nb\n", (Host("a", 2), Host("b", 1))),
    ],
    "slurm": [
        ("nid[001-002,007],login1", tuple(Host(name, 1) for name in ("nid001", "nid002", "nid007", "login1"))),
        (
            "SLURM_JOB_NODELIST=n[1-3]\nSLURM_TASKS_PER_NODE=4(x2),3\n",
            (Host("n1", 4), Host("n2", 4), Host("n3", 3)),
        ),
        ("SLURM_NODELIST=n[1-2]\nSLURM_JOB_NODELIST=n[1-2]\nSLURM_NTASKS_PER_NODE=2", (Host("n1", 2), Host("n2", 2))),
        ("SLURM_TASKS_PER_NODE=3,1\nSLURM_JOB_NODELIST=n[2,1]\nSLURM_JOB_ID=7\n", (Host("n2", 3), Host("n1", 1))),
        ("n1\nn2\n", (Host("n1", 1), Host("n2", 1))),
    ],
    "sge": [
        ("a 4 all.q@a UNDEFINED\nb 2 all.q@b UNDEFINED\n", (Host("a", 4), Host("b", 2))),
        ("a 4 all.q@a 0,1:0,2\na 2 gpu.q@a UNDEFINED\n", (Host("a", 6),)),
    ],
    "deepspeed": [("a slots=4\nbob@b slots=2\n", (Host("a", 4), Host("b", 2, user="bob")))],
    "kubernetes": [
        ("#!/bin/sh\necho p-0.p.ns.svc\necho p-1.p.ns.svc:2\n", (Host("p-0.p.ns.svc", 1), Host("p-1.p.ns.svc", 2))),
        ("p-0.p.ns.svc slots=2\n", (Host("p-0.p.ns.svc", 2),)),
        ("p-0.p.ns.svc:2\np-1.p.ns.svc\n", (Host("p-0.p.ns.svc", 2), Host("p-1.p.ns.svc", 1))),
        ("job-worker-0,job-worker-1\n", (Host("job-worker-0", 1), Host("job-worker-1", 1))),
    ],
    "plain": [("a\nbob@b\n", (Host("a", None), Host("b", None, user="bob")))],
}


@pytest.mark.parametrize(
    ("dialect", "text", "hosts"),
    [(name, text, hosts) for name, cases in MEANINGS.items() for text, hosts in cases],
)
def test_a_dialect_that_is_named_means_what_its_tool_means(dialect: str, text: str, hosts: tuple[Host, ...]) -> None:
    assert parse_hostfile(text, "hosts", dialect).hosts == hosts


def test_every_dialect_is_in_the_table() -> None:
    assert MEANINGS.keys() == DIALECTS.keys()


@pytest.mark.parametrize(
    ("dialect", "text", "named"),
    [(name, text, named) for name, cases in BAD_HOSTFILES.items() for text, named in cases],
)
def test_what_a_dialect_cannot_have_is_refused_with_line_and_cure(dialect: str, text: str, named: str) -> None:
    with refused("hostfile-invalid", names=[named], kind=HostfileError):
        parse_hostfile(text, "hosts", dialect)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_all_problems_of_a_file_are_told_together(dialect: str) -> None:
    # No dialect can have these lines, the second and fourth of the file.
    with pytest.raises(HostfileError) as caught:
        parse_hostfile("# hosts\na;reboot\n\n-oProxyCommand=x\n", "hosts", dialect)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["2", "4"]
    assert all(line.startswith("hosts:") for line in str(caught.value).splitlines())


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("node1 slots=4\n", "Open MPI"),
        ("node1:4\n", "MPICH"),
        ("node1:4,node2:4\n", "Horovod"),
        ("node1 4 all.q@node1 UNDEFINED\n", "SGE"),
        ("node1 4 node2 4\n", "LSF"),
        ("LSB_HOSTS=node1 node1\n", "LSF"),
        ("SLURM_JOB_NODELIST=node[1-2]\nSLURM_TASKS_PER_NODE=2(x2)\n", "Slurm"),
        ("#!/bin/sh\necho node1\n", "Kubernetes"),
        ("node[1-2]:4", "MPICH"),
    ],
)
def test_a_dialect_is_recognised_and_nothing_is_said_where_all_read_the_same(text: str, chosen: str) -> None:
    found = parse_hostfile(text, "hosts")
    assert found.source == f"hosts ({chosen})"
    assert found.notes == ()


def test_where_dialects_differ_both_readings_and_the_way_out_are_said() -> None:
    (note,) = parse_hostfile("node1\nnode2\n", "hosts").notes
    assert note.startswith(
        "hosts: read in the format of Open MPI as node1:cores, node2:cores: a host without slots may run as many"
    )
    assert "MPICH, PBS, LSF and Intel MPI's -machinefile would read node1:1, node2:1" in note
    assert "--hostfile-format openmpi|hydra" in note
    assert "--slots-per-host" in note


@pytest.mark.parametrize("format", ["openmpi", "hydra", "pbs"])
def test_nothing_is_said_where_the_dialect_is_named(format: str) -> None:
    assert parse_hostfile("node1\nnode2\n", "hosts", format).notes == ()


def test_slots_per_host_are_for_hosts_without_and_end_the_doubt() -> None:
    found = parse_hostfile("node1\nnode2\n", "hosts", slots=8)
    assert found.hosts == (Host("node1", 8), Host("node2", 8))
    assert found.notes == ()
    assert parse_hostfile("node1 slots=2\nnode2\n", "hosts", slots=8).hosts == (Host("node1", 2), Host("node2", 8))


def test_what_is_understood_and_not_used_is_said() -> None:
    (note,) = parse_hostfile("a:2 binding=user:0\nb:2 binding=user:1\n", "hosts", "hydra").notes
    assert note.startswith("hosts: binding= is ignored")


def test_names_of_dialects_have_synonyms_and_any_case() -> None:
    assert find_dialect("MPICH").name == "hydra"
    assert find_dialect("PRRTE").name == "openmpi"
    with refused("hostfile-format-unknown", names=["'pigeon'", "auto", "deepspeed, horovod"]):
        find_dialect("pigeon")


def test_a_file_that_is_something_else_does_not_fill_the_screen() -> None:
    with pytest.raises(HostfileError) as caught:
        parse_hostfile("this is no hostfile!\n" * 5000, "hosts")
    assert len(caught.value.problems) == 102
    assert "has 4900 more problems" in caught.value.problems[100]


@pytest.mark.slow  # 66,000 hosts are read
def test_a_range_too_far_does_not_fill_the_memory() -> None:
    with refused("hostfile-invalid", names=["hosts:2: ", "more than 65536 hosts"], kind=HostfileError):
        parse_hostfile("n[1-33000]\n" * 2, "hosts")


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialects_own_sample_is_read(name: str) -> None:
    dialect = DIALECTS[name]
    assert parse_hostfile(dialect.sample, "hosts", name).hosts
    with refused("hostfile-invalid", names=["hosts: has no hosts", dialect.sample], kind=HostfileError):
        parse_hostfile("", "hosts", name)


@pytest.mark.parametrize("sample", sorted(path.name for path in SAMPLES.iterdir() if path.suffix != ".md"))
def test_the_samples_are_good_and_recognised(sample: str) -> None:
    found = find_hostfile(str(SAMPLES / sample))
    assert found.hosts
    dialect = Path(sample).suffix.removeprefix(".")
    if dialect:
        assert [host.name for host in find_hostfile(str(SAMPLES / sample), dialect).hosts] == [
            host.name for host in found.hosts
        ]
    assert sample in (SAMPLES / "README.md").read_text()
