"""Elastic jobs whose ranks need not wait for one another: they go on from the last commit when one has died."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from elastic_job import started

pytestmark = pytest.mark.group("elastic jobs")

_SCRIPT = Path(__file__).parents[1] / "support" / "asynchronous_elastic_script.py"


@pytest.mark.native("Horovod's core has no messages")
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "victim"), [("AsynchronousOptimizer", 0), ("BackupSteps", 1)])
def test_the_others_go_on_when_a_rank_has_died(tmp_path: Path, kind: str, victim: int) -> None:
    options = ("-np", "3", "--min-np", "2")
    with started(*options, command=(str(_SCRIPT), kind, str(victim), str(tmp_path / "killed"))) as job:
        output = job.end()
    assert job.process.returncode == 0, output
    assert len(re.findall("begins at 10 with", output)) >= 2, output
    ends = re.findall(r"ends at 40 with (\d) ranks, alike: True, learned: True", output)
    assert ends and len(ends) == int(ends[0]), output
