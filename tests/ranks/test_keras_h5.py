"""hvd.load_model: training goes on from `.h5` files, and files that are still being written are waited for."""

from __future__ import annotations

from pathlib import Path

import pytest
from keras_ranks import each_backend, run_check

pytestmark = [pytest.mark.ranks, pytest.mark.native("what a file holds has nothing to do with the engine")]


# Which variable is which is the same on every backend; PyTorch compiles no steps, and takes the least time for many.
_OTHERS = [pytest.param(backend, marks=pytest.mark.slow) for backend in ("jax", "tensorflow")]
torch_for_all = pytest.mark.parametrize("backend", ["torch", *_OTHERS])


@each_backend
def test_training_goes_on_as_if_it_had_never_stopped(backend: str, tmp_path: Path) -> None:
    run_check(2, backend, "keras_h5:resumed", str(tmp_path), ["Adam", "SGD"])


# On TensorFlow test_files_of_keras_2 has the others.
_NEW = ["Adagrad", "Nadam", "Lion", "Lamb"]


@pytest.mark.parametrize(
    ("backend", "names"),
    [
        ("torch", ["AdamW", "RMSprop", "Adagrad"]),
        ("torch", ["Adadelta", "Adamax", "Nadam"]),
        ("torch", ["Ftrl", "Lion", "Lamb"]),
        ("tensorflow", _NEW),
    ],
)
def test_every_optimizer_goes_on_where_it_was(backend: str, names: list[str], tmp_path: Path) -> None:
    run_check(2, backend, "keras_h5:resumed", str(tmp_path), names)


@each_backend
@pytest.mark.parametrize("check", ["resumed_otherwise", "refused"])
def test_files_of_any_model(backend: str, check: str, tmp_path: Path) -> None:
    run_check(2, backend, f"keras_h5:{check}", str(tmp_path))


@torch_for_all
def test_a_file_that_is_still_written_is_waited_for(backend: str, tmp_path: Path) -> None:
    run_check(2, backend, "keras_h5:still_written", str(tmp_path))


@pytest.mark.parametrize("backend", ["torch", pytest.param("tensorflow", marks=pytest.mark.slow)])
def test_files_of_keras_2(backend: str) -> None:
    run_check(2, backend, "keras_h5:from_keras_2")
