"""What hvdrun finds wrong on the hosts before any rank starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hvdkit.launch.agent.host_info import probe_host
from hvdkit.launch.plan.resources import HostResources, find_problems, parse_resources

GOOD = HostResources((0, 1, 2, 3), 8, 5000, "3.11.7")


def test_a_healthy_job_is_not_talked_about() -> None:
    assert find_problems([("a", GOOD), ("a", GOOD), ("b", GOOD)]) == []
    assert find_problems([("a", HostResources((0,), 1, 5000, "3.11.7"))] * 4) == [], "there is no other core"
    bound = [("a", HostResources((core,), 8, 5000, "3.11.7")) for core in range(4)]
    assert find_problems(bound) == [], "each has one of its own"
    assert find_problems([("a", HostResources())] * 2) == [], "nothing is known"


def test_ranks_that_share_one_core_are_told_once_a_host() -> None:
    pinned = HostResources((3,), 8, 5000, "3.11.7")
    (text,) = find_problems([("a", pinned), ("a", pinned), ("b", GOOD), ("b", GOOD)])
    assert text.startswith("a: all 2 ranks are restricted to core 3 of 8.") and "--cpus-per-task" in text


@pytest.mark.parametrize(("free", "seen"), [(10, "10 MiB free"), (-1, "no directory")])
def test_too_little_shared_memory_is_told(free: int, seen: str) -> None:
    small = HostResources((0, 1), 2, free, "3.11.7")
    (text,) = find_problems([("a", small), ("a", small)])
    assert seen in text and "--shm-size" in text
    assert find_problems([("a", small)]) == [], "one rank shares with nobody"


def test_different_pythons_are_told_with_their_hosts() -> None:
    (text,) = find_problems([("a", GOOD), ("b", HostResources((0,), 1, 5000, "3.9.2")), ("c", GOOD)])
    assert "3.11.7 on a, c; 3.9.2 on b" in text


def test_an_agent_tells_what_is_understood() -> None:
    machine = parse_resources(probe_host(os.environ))
    assert machine.cores >= len(machine.allowed) >= 1 and machine.shared_mib >= -1
    assert probe_host({"HVDKIT_SHARED_DIRECTORY": "/no/such/folder"})["shared_mib"] == -1
    for told in ({"allowed": ["x"], "cores": 1, "shared_mib": 1, "python": ""}, {"cores": 1}):
        with pytest.raises((ValueError, KeyError)):
            parse_resources(told)


@pytest.mark.ranks
def test_hvdrun_under_taskset_says_that_all_ranks_share_a_core() -> None:
    core = min(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, "-m", "hvdkit.launch", "-np", "2", "true"],
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    if os.cpu_count() == 1:
        return  # there is no other core to miss
    assert f"all 2 ranks are restricted to core {core}" in done.stderr
