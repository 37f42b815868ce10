"""A rank is killed or stopped while a process group of torch reduces a bucket: the job goes on, ends or waits."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from elastic_job import started
from hvdrun_job import HVDRUN, ROOT, environment

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300), pytest.mark.group("elastic jobs"), pytest.mark.slow]

SCRIPT = str(ROOT / "tests" / "support" / "ending_in_bucket_script.py")
DEVICES = ("--device-transport", "torch")


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_the_others_go_on_without_it_in_an_elastic_job(name: str) -> None:
    options = ("-np", "3", "--min-np", "2", "--elastic-hang-timeout-s", "5", *DEVICES)
    with started(*options, command=(SCRIPT, name, "60")) as job:
        output = job.end()
    assert job.process.returncode == 0, output
    assert "trained with [3, 2" in output and "alike: True" in output
    assert "Rank 1 on" in output and "The operations of GLOO on rank 0" in output
    assert ("is killed: it has been stopped by SIGSTOP for 5 s" in output) == (name == "SIGSTOP")
    assert "Traceback" not in output


def _run(name: str, *options: str) -> tuple[int, str]:
    command = [*HVDRUN, "-np", "3", *DEVICES, *options, sys.executable, SCRIPT, name, "60"]
    done = subprocess.run(
        command, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_a_killed_rank_ends_a_job_that_is_not_elastic() -> None:
    code, output = _run("SIGKILL")
    assert code == 128 + 9 and "rank 1 on" in output and "SIGKILL" in output, output


def test_a_silent_rank_is_reported_and_ended_as_on_every_transport() -> None:
    """Without --stall-shutdown-s the job waits for it."""
    code, output = _run("SIGSTOP", "--stall-check-s", "2", "--stall-shutdown-s", "4")
    assert code != 0 and "was stopped by SIGSTOP; to continue it: kill -CONT" in output, output
    report = "it was submitted by rank 0 .*, rank 2 .*, and not by rank 1 "
    assert re.search(rf"WARNING: gradients of optimizer.* has been waiting for \d+ s: {report}", output)
    assert re.search(rf"errors.HorovodInternalError: gradients of optimizer.*{report}", output)
    assert "It was aborted after stall_shutdown_s=4 s" in output and "GLOO failed" not in output
