"""A job that is told to end saves, says so by its exit code, and goes on by the same command: with real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300), pytest.mark.group("elastic jobs")]

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "pytorch_resumable_digits.py"


def start(folder: Path, ranks: int, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hvdkit.launch", "--verbose", "-np", str(ranks), sys.executable, str(DIGITS)]
    command += ["--checkpoints", "checkpoints"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(
        [*command, *options], cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_a_training_that_is_killed_and_then_told_to_end_goes_on_each_time_at_last_on_more_ranks(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoints"
    killed = start(tmp_path, 2, "--epochs", "100000", "--every", "0.2")
    deadline = time.monotonic() + 60
    while not (saved / "checkpoint-000002").exists():
        assert time.monotonic() < deadline and killed.poll() is None
        time.sleep(0.05)
    killed.kill()
    killed.communicate()

    told = start(tmp_path, 2, "--epochs", "100000")
    assert told.stdout is not None
    assert told.stderr is not None
    said = ""
    while not (found := re.search(r"rank 1 on \S+: pid (\d+)", said)):
        said += told.stderr.readline()
    first = told.stdout.readline()
    assert "epoch 1 " not in first, "it was done before"
    os.kill(int(found[1]), signal.SIGTERM)
    output, errors = told.communicate(timeout=120)
    assert told.returncode == 75, errors
    assert re.search(r"continuing from \S+/checkpoint-\d+\n", said + errors)
    assert "rank 1 received SIGTERM: the checkpoint is saved, and the job ends with exit code 75" in errors
    assert "hvdrun: saved, not finished: ended with exit code 75" in errors
    last = int(re.findall(r"epoch (\d+) ", first + output)[-1])

    again = start(tmp_path, 3, "--epochs", str(last + 4), "--min-accuracy", "0.9")
    output, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    assert int(re.findall(r"epoch (\d+) ", output)[0]) in (last, last + 1)
    assert "test accuracy 9" in output
    assert len(os.listdir(saved)) == 3
