"""The Keras example on each backend, as a user starts it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from gallery import ENOUGH, EPOCHS
from keras_ranks import PACKAGES

pytestmark = pytest.mark.group("jobs")

HERE = Path(__file__).parents[1] / "support"
DIGITS = str(HERE.parents[1] / "examples" / "keras_digits.py")


def start(folder: Path, backend: str, launcher: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    for package in ("keras", PACKAGES[backend]):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    command = [*launcher, sys.executable, str(HERE / "without_tensorflow.py"), DIGITS, *options]
    env = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_the_digits_are_learned_on_two_ranks(tmp_path: Path, backend: str, engine: str) -> None:
    launcher = [sys.executable, "-m", "hvdkit.launch", "-np", "2"]
    wished, last_epoch = (
        (("--min-accuracy", "0.97"), 20) if (backend, engine) == ("tensorflow", "native") else (ENOUGH, EPOCHS)
    )
    done = start(tmp_path, backend, launcher, *wished, "--checkpoint", "digits.keras")
    assert done.returncode == 0, done.stdout + done.stderr
    # Two lines an epoch, from rank 0 alone, and nothing that only a terminal understands.
    epochs = re.findall(rf"^\[0\] Epoch (\d+)/{last_epoch}", done.stdout, re.MULTILINE)
    assert epochs == [str(epoch) for epoch in range(1, last_epoch + 1)]
    assert len(re.findall(r"^\[0\] .* loss: .* samples/s: ", done.stdout, re.MULTILINE)) == last_epoch
    assert "[1]" not in done.stdout
    assert "\x1b" not in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("[0] 2 ranks on 1 host")
    assert f" on {backend}, " in last
    assert list(tmp_path.iterdir()) == [tmp_path / "digits.keras"]
    assert "model.weights.h5" in zipfile.ZipFile(tmp_path / "digits.keras").namelist()
    for words in ("retracing", "Traceback", "UserWarning"):
        assert words not in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.native("one process has no engine")
@pytest.mark.parametrize("backend", ["torch"])
def test_the_digits_are_learned_without_a_launcher(tmp_path: Path, backend: str) -> None:
    done = start(tmp_path, backend, [], "--epochs", "1", "--min-accuracy", "1")
    assert done.returncode == 1, "one epoch does not get everything right"
    assert "test accuracy" in done.stdout
    assert list(tmp_path.iterdir()) == []
