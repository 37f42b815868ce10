"""What other users of the hosts see of a job, and what its own user can ask: the job's secret is nowhere to be read."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from cluster.jobs import EVERYWHERE, HVDRUN, running, signal_rank
from cluster.lab import Lab, environment

pytestmark = pytest.mark.cluster


def test_what_all_ranks_do_is_told_on_the_host_of_hvdrun(lab: Lab) -> None:
    with running(lab) as job:
        signal_rank(lab, job, 1, signal.SIGSTOP)
        told = lab.run("node1", [sys.executable, "-m", "hvdkit", "stacks"])
        assert told.returncode == 0, told.stderr
        odd, same = told.stdout.split("\nranks 0 on node1; 2 on node3")
        assert f"rank 1 on node2: stopped by a signal (pid {job.ranks[1][1]}" in odd
        assert "loop.py" in same and "in allreduce" in same
        signal_rank(lab, job, 1, signal.SIGCONT)


def test_variables_that_are_kept_back_reach_no_host(lab: Lab) -> None:
    command = [*HVDRUN, "--no-forward-env", "API_*", "-np", "3", "-H", EVERYWHERE, "sh", "-c", "echo $API_TOKEN $OTHER"]
    done = lab.run("node1", command, env=environment(API_TOKEN="do not show this", OTHER="sent"))
    assert sorted(line.split("] ")[1] for line in done.stdout.splitlines()) == ["sent"] * 3, done.stderr


def test_no_command_line_has_the_secret_or_a_variables_value(lab: Lab) -> None:
    with running(lab, env=environment(API_TOKEN="do not show this")):
        lines = [line for host in lab.hosts.values() for line in host.processes().values()]
        secrets = [
            word.partition(b"=")[2].decode()
            for pid in lab.hosts["node1"].processes()
            for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if word.startswith(b"HVDKIT_CONTROL_SECRET=")
        ]
        assert len(set(secrets)) == 1 and len(lines) > 8
        for secret in {*secrets, "do not show this"}:
            assert not [line for line in lines if secret in line]
