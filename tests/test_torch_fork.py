"""Workers of a DataLoader that are forked after init(): training works, all processes end, nothing hangs at exit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rank_job import find_mpirun

TESTS = Path(__file__).parent


def _run(case: str, progress: str) -> subprocess.CompletedProcess[str]:
    paths = [str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HVDKIT_PROGRESS": progress,
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "^ofi,uct",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    command = [*find_mpirun(), "-n", "2", sys.executable, str(TESTS / "fork_job.py"), case]
    return subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=90)


@pytest.mark.ranks
@pytest.mark.parametrize(("case", "progress"), [("workers", "thread"), ("workers", "inline"), ("fork", "thread")])
def test_forked_workers_come_and_go(case: str, progress: str) -> None:
    done = _run(case, progress)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "rank 0 done, 0.000000 apart", "rank 1 done, 0.000000 apart"]
    assert "hvdkit" not in done.stderr


@pytest.mark.ranks
def test_a_worker_that_dies_ends_the_job() -> None:
    done = _run("dies", "inline")
    assert done.returncode != 0, done.stderr
    assert "done" not in done.stdout
