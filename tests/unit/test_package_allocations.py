"""A scheduler of a package: hvdrun takes its hosts as those of the schedulers that hvdkit knows."""

from __future__ import annotations

from pathlib import Path

import pytest
from package_entry_points import plant_package
from planned_job import plan_job
from refused import refused

from hvdkit.errors import HvdkitError
from hvdkit.launch.allocations import read_allocation
from hvdkit.launch.allocations.schedulers import ENTRY_POINTS, SCHEDULERS, find_scheduler, list_schedulers
from hvdkit.launch.cli.options import parse_arguments
from hvdkit.launch.detect.hosts import find_hosts

CODE = """
from hvdkit.errors import LaunchError
from hvdkit.launch.allocations import AllocationReader, FoundHosts, Host

def read(environ):
    if "GRAPE_JOB" not in environ:
        return None
    if not environ.get("GRAPE_HOSTS"):
        raise LaunchError("Grape job: GRAPE_HOSTS is not set. Name the hosts with -H.", code="grape-hosts")
    words = [word.split("*") for word in environ["GRAPE_HOSTS"].split()]
    hosts = tuple(Host(name, int(count)) for name, count in words)
    return FoundHosts(hosts, f"Grape job {environ['GRAPE_JOB']}", more_slots_hint="request more with grape -n")

READER = AllocationReader("grape", "GRAPE_JOB", "GRAPE_FILE", read)
"""
ENVIRON = {"PATH": "/bin", "HOME": "/root", "GRAPE_JOB": "17", "GRAPE_HOSTS": "localhost*3"}


@pytest.fixture
def grape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_package(tmp_path, "planted_grape", CODE, ENTRY_POINTS, {"grape": "planted_grape:READER"})
    monkeypatch.syspath_prepend(tmp_path)


def test_the_hosts_of_a_scheduler_of_a_package_are_used(grape: None) -> None:
    job = plan_job(parse_arguments(["true"]), ENVIRON)
    assert (job.ranks, [(host.name, host.slots) for host in job.hosts]) == (3, [("localhost", 3)])
    assert "3 ranks on localhost:3, from Grape job 17." in job.notes
    found = read_allocation({**ENVIRON, "GRAPE_HOSTS": "a*1 b*2"}, slots=4)
    assert found is not None and found.allocated
    assert [(host.name, host.slots) for host in found.hosts] == [("a", 4), ("b", 4)]
    assert found.more_slots_hint.startswith("request more with grape -n, or ")


def test_it_is_named_and_its_errors_end_the_start(grape: None) -> None:
    assert find_scheduler(ENVIRON) == "grape" and find_scheduler({**ENVIRON, "PBS_JOBID": "1"}) == "pbs"
    with refused("grape-hosts"):
        read_allocation({**ENVIRON, "GRAPE_HOSTS": ""})
    assert read_allocation({"PATH": "/bin"}) is None


def test_a_node_file_that_is_no_dialect_is_read_as_any_file(grape: None, tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("localhost slots=2\n")
    found = find_hosts(None, str(file), {**ENVIRON, "GRAPE_FILE": str(file)}, format="auto", slots=None)
    assert found is not None and found.hosts[0].slots == 2


def test_hvdkits_own_schedulers_come_first() -> None:
    assert list_schedulers() == SCHEDULERS


@pytest.mark.parametrize(
    ("number", "name", "changed", "message"),
    [
        (1, "grape", ("import LaunchError", "import NoSuchError"), "ImportError: cannot import name 'NoSuchError'"),
        (
            2,
            "grape",
            ('AllocationReader("grape"', 'AllocationReader("melon"'),
            "an AllocationReader with the name grape",
        ),
        (3, "grape", ("READER = AllocationReader", "READER = dict"), "cannot be loaded: TypeError"),
        (5, "grape", ("READER = AllocationReader", "raise SystemExit(0)\nREADER = AllocationReader"), "SystemExit: 0"),
        (4, "pbs", ('AllocationReader("grape"', 'AllocationReader("pbs"'), "has the name of one of hvdkit's"),
    ],
)
def test_a_package_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str, changed: tuple[str, str], message: str
) -> None:
    module = f"planted_scheduler_{number}"
    plant_package(tmp_path, module, CODE.replace(*changed), ENTRY_POINTS, {name: f"{module}:READER"})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HvdkitError, match=message) as error:
        read_allocation({"PATH": "/bin"})
    assert str(error.value).startswith(f"the package {module} cannot be loaded: ")
