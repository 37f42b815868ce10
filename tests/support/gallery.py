"""The examples that end with a number, how they are started, and what the number has to be."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

#: Options of the digits that show that a training learns; all 20 epochs, to 97 %, are for tests/ranks/test_examples.py,
#: tests/jobs/test_tensorflow_example.py and, on one backend and engine, tests/jobs/test_keras_example.py.
EPOCHS = 6
ENOUGH = ("--epochs", str(EPOCHS), "--min-accuracy", "0.85")

#: Script -> what its last number is called, and the two values it lies between. One process reaches the same.
REACHED = {
    "keras_asynchronous.py": ("accuracy", 80.0, 100.0),
    "keras_regression.py": ("R2", 0.25, 0.5),
    "keras_uneven.py": ("accuracy", 90.0, 100.0),
    "keras_zero.py": ("accuracy", 92.0, 100.0),
    "lightning_digits.py": ("accuracy", 90.0, 100.0),
    "pytorch_accumulation.py": ("accuracy", 92.0, 100.0),
    "pytorch_asynchronous.py": ("accuracy", 80.0, 100.0),
    "pytorch_backup_steps.py": ("accuracy", 85.0, 100.0),
    "pytorch_diloco.py": ("accuracy", 92.0, 100.0),
    "pytorch_embeddings.py": ("accuracy", 62.0, 100.0),
    "pytorch_language_model.py": ("loss", 1.5, 2.7),
    "pytorch_mesh.py": ("accuracy", 90.0, 100.0),
    "pytorch_regression.py": ("R2", 0.25, 0.5),
    "pytorch_simulation.py": ("R2", 0.9, 1.0),
    "pytorch_tracking.py": ("accuracy", 90.0, 100.0),
    "pytorch_two_models.py": ("accuracy", 92.0, 100.0),
    "pytorch_uneven.py": ("accuracy", 92.0, 100.0),
    "pytorch_zero.py": ("accuracy", 92.0, 100.0),
}


def start(
    folder: Path, name: str, launcher: Sequence[str], options: Sequence[str] = (), limit: float = 100
) -> subprocess.CompletedProcess[str]:
    """Run a script of the gallery with hvdrun, and these options of hvdrun and of the script, in a folder of its own.

    name: below examples/. limit: in seconds.
    """
    if name.rpartition("/")[2].startswith("keras") and importlib.util.find_spec("keras") is None:
        pytest.skip("keras is not installed")
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    env.setdefault("KERAS_BACKEND", "torch")
    script = [sys.executable, str(EXAMPLES / name), *options]
    command = [sys.executable, "-m", "hvdkit.launch", *launcher, *script]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=limit)


def play(name: str) -> str:
    """Run a script of the gallery in this rank, which is there already; returns what it printed.

    Raises AssertionError if it leaves anything in the working directory.
    """
    adapter = importlib.import_module("hvdkit.keras" if name.startswith("keras") else "hvdkit.torch")
    arguments, sys.argv = sys.argv, [name]
    before = os.getcwd()
    adapter.shutdown()  # the script is to begin as a process does, whatever this rank did before
    try:
        with redirect_stdout(io.StringIO()) as printed, tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
            assert os.listdir(folder) == []
    finally:
        sys.argv = arguments
        os.chdir(before)
        adapter.shutdown()  # its process sets go with it
    return printed.getvalue()


def check_reached(name: str, output: str) -> None:
    """The last number that the script calls so is what it has to be."""
    called, least, most = REACHED[name]
    numbers = re.findall(rf"test {called} (-?[\d.]+)", output)
    assert numbers, f"no {called} in the output:\n{output}"
    assert least <= float(numbers[-1]) <= most
