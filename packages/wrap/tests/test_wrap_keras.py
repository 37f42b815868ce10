"""hvdrun --wrap with a Keras script: fit() on two ranks ends as in one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from keras_ranks import PACKAGES
from test_wrap import run

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300), pytest.mark.group("jobs")]


def _use(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("keras", PACKAGES[backend]):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("KERAS_BACKEND", backend)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")


@pytest.mark.parametrize("backend", ["tensorflow"])
def test_fit_ends_on_two_ranks_as_in_one_process(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _use(backend, monkeypatch)
    alone, _ = run("wrap_keras_script.py", tmp_path / "alone")
    wrapped, said = run("wrap_keras_script.py", tmp_path / "wrapped", ranks=2)
    expected = [line.split() for line in alone.splitlines()]
    found = [line.removeprefix("[0] ").split() for line in wrapped.splitlines()]
    assert "[1]" not in wrapped
    for one, other in zip(expected, found, strict=True):
        numbers = [[float(word) for word in line if word != "True"] for line in (one, other)]
        np.testing.assert_allclose(np.array(numbers[1]), np.array(numbers[0]), rtol=0, atol=5e-5)
    assert said.count("hvdrun --wrap") == 1 and "wrap_keras_script.py:" in said, said


@pytest.mark.parametrize(
    "backend",
    ["jax", pytest.param("tensorflow", marks=pytest.mark.slow), pytest.param("torch", marks=pytest.mark.slow)],
)
def test_the_logged_loss_and_weighted_metrics_of_unequal_parts_are_those_of_one_process(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use(backend, monkeypatch)
    said, _ = run("wrap_keras_metrics_script.py", ranks=3)
    rows = [[float(word) for word in line.removeprefix("[0] ").split()] for line in said.splitlines()]
    assert len(rows) == (4 if backend == "tensorflow" else 3)
    for logged, whole, right, all_right in rows:
        assert (logged, right) == pytest.approx((whole, all_right), abs=2e-6), said


@pytest.mark.slow
def test_a_multiplied_batch_is_warmed_up_once_and_what_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use("tensorflow", monkeypatch)
    monkeypatch.chdir(tmp_path)
    said, _ = run("wrap_keras_rates_script.py", ranks=2, options=("--wrap", "--wrap-batch", "multiply"))
    steps, *refused = said.replace("[0] ", "").splitlines()
    # 8 steps an epoch; Horovod's warm-up counts a batch when it is done
    expected = [0.1 * min(1 + (step + 1) / 8, 2) for step in range(24)]
    assert [float(step) for step in steps.split()] == pytest.approx(expected, abs=2e-5)
    words = ["gets a generator", "BackupAndRestore", "reduction='sum'", "learning rate is a schedule"]
    for line, word in zip(refused, words, strict=True):
        assert line.startswith("refused:") and word in line and "wrap_keras_rates_script.py:" in line, said
