"""Ranks and whole hosts are lost, and the others go on: three hosts with a network between them."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster.jobs import EVERYWHERE, HVDRUN, Job, signal_rank
from cluster.lab import Lab
from elastic_world_script import reference

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(150)]

SCRIPT = Path(__file__).parents[1] / "elastic_world_script.py"


@contextmanager
def training(lab: Lab, steps: int, *options: str) -> Iterator[tuple[Job, list[str]]]:
    """The script at work on all hosts, once something has been committed; with what it has said until then."""
    command = [*HVDRUN, "--elastic", *options, "-H", EVERYWHERE, sys.executable, str(SCRIPT), str(steps), "0.02", "5"]
    process = lab.start("node1", command)
    job, said = Job(process, {}), list[str]()
    try:
        assert process.stdout is not None
        while len(job.ranks) < 3 or "committed 10" not in said[-1]:
            said.append(process.stdout.readline())
            assert said[-1], (said, process.communicate())
            if found := re.match(r"\[(\d+) (\S+)\] pid (\d+)", said[-1]):
                job.ranks[int(found[1])] = found[2], int(found[3])
        yield job, said
    finally:
        process.kill()
        process.communicate()


def outcome(job: Job, timeout: float) -> dict[str, object]:
    output, errors = job.process.communicate(timeout=timeout)
    assert job.process.returncode == 0, errors
    found: dict[str, object] = json.loads(next(line for line in output.splitlines() if '"summary"' in line)[9:])
    return {**found, "said": errors}


def test_a_rank_of_another_host_is_outlived(lab: Lab) -> None:
    with training(lab, 200, "-np", "3", "--min-np", "2") as (job, _):
        signal_rank(lab, job, 1, signal.SIGKILL)
        result = outcome(job, 60)
    assert result["sizes"] == [3, 2] and result["alike"]
    assert result["summary"] == pytest.approx(reference(200), abs=1e-12)


def test_a_host_that_is_cut_off_ends_the_job_with_a_clear_word(lab: Lab) -> None:
    with training(lab, 2000, "-np", "3", "--min-np", "2") as (job, _):
        lab.cut("node3")
        _, errors = job.process.communicate(timeout=40)
    assert job.process.returncode not in (0, None)
    assert "rank 2 on node3 was lost" in errors
