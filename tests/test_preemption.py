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

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(110)]

ROOT = Path(__file__).parents[1]
DIGITS = ROOT / "examples" / "pytorch_resumable_digits.py"


def start(folder: Path, ranks: int, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hvdkit.launch", "--verbose", "-np", str(ranks), sys.executable, str(DIGITS)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(
        [*command, *options], cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("to", ["hvdrun by SIGUSR1", "rank 1 by SIGTERM"])
def test_the_example_is_ended_and_goes_on_where_it_was_on_more_ranks(tmp_path: Path, to: str) -> None:
    process = start(tmp_path, 2, "--epochs", "100000")
    assert process.stdout is not None
    assert process.stderr is not None
    pid, told = 0, ""
    while not pid:
        told += process.stderr.readline()
        pid = int(next(iter(re.findall(r"rank 1 on \S+: pid (\d+)", told)), 0))
    while "epoch 2 " not in process.stdout.readline():
        assert process.poll() is None
    name = to.rpartition(" ")[2]
    os.kill(pid if to.startswith("rank") else process.pid, signal.Signals[name])
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert re.search(rf"{name} came to rank \d: saved, and ending with exit code 75", errors)
    assert "hvdrun: saved, not finished: ended with exit code 75" in errors
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint-000001"]
    epochs = [int(one) for one in re.findall(r"epoch (\d+) ", output)] or [2]

    again = start(tmp_path, 3, "--epochs", str(epochs[-1] + 4), "--min-accuracy", "0.9")
    output, errors = again.communicate(timeout=60)
    assert again.returncode == 0, errors
    assert "going on from" in errors
    first = int(re.findall(r"epoch (\d+) ", output)[0])
    assert first in (epochs[-1], epochs[-1] + 1)
    assert "test accuracy 9" in output


def test_a_kill_during_training_costs_no_more_than_what_came_after_the_last_checkpoint(tmp_path: Path) -> None:
    process = start(tmp_path, 2, "--epochs", "100000", "--every", "0.2")
    deadline = time.monotonic() + 60
    while not (tmp_path / "checkpoints" / "checkpoint-000002").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.communicate()
    again = start(tmp_path, 2, "--epochs", "1")
    output, errors = again.communicate(timeout=60)
    assert again.returncode == 0, errors
    assert re.search(r"going on from \S+/checkpoint-\d+", errors)
    assert "epoch 1 " not in output, "it was done before"
