from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.group("jobs")

DIGITS = str(Path(__file__).parents[2] / "examples" / "tensorflow2_digits.py")


# On Horovod's core test_tensorflow_training.py trains with the tape, and test_keras_example.py learns the digits.
@pytest.mark.slow
@pytest.mark.ranks
def test_the_digits_are_learned_with_tensorflow_on_two_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hvdkit.launch", "-np", "2", sys.executable, DIGITS]
    command += ["--min-accuracy", "0.97", "--checkpoint", "digits"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    # One line an epoch, from rank 0 alone, and nothing that only a terminal understands.
    epochs = re.findall(r"^\[0\] epoch (\d+)  loss [\d.]+  [\d,]+ samples/s$", done.stdout, re.MULTILINE)
    assert epochs == [str(epoch) for epoch in range(1, 21)]
    assert "[1]" not in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("[0] 2 ranks on 1 host")
    assert "retracing" not in done.stderr
    written = {path.name for path in (tmp_path / "digits").iterdir()}
    assert written == {"checkpoint", "ckpt-20.index", "ckpt-20.data-00000-of-00001"}


@pytest.mark.slow
def test_the_digits_are_learned_with_tensorflow_without_a_launcher(tmp_path: Path) -> None:
    command = [sys.executable, DIGITS, "--epochs", "1", "--min-accuracy", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, "one epoch does not get everything right"
    assert "test accuracy" in done.stdout
    assert list(tmp_path.iterdir()) == []
