"""hvd.checkpoint for Keras, on each backend."""

from __future__ import annotations

from pathlib import Path

import pytest
from keras_ranks import each_backend, run_check

pytestmark = [pytest.mark.ranks, pytest.mark.native("what an engine does here, test_torch_checkpoint.py sees on both")]


@pytest.mark.slow
@each_backend
def test_a_fit_that_was_ended_goes_on_with_the_next_epoch(backend: str, tmp_path: Path) -> None:
    ended = run_check(2, backend, "keras_checkpoints:train", tmp_path / "a", signal_after=0)
    assert [code for code, _ in ended] == [75, 75]
    resumed = run_check(2, backend, "keras_checkpoints:train", tmp_path / "a")
    assert [epoch for epoch, _ in resumed] == [1, 1]
    assert resumed[0][1] == resumed[1][1], "all ranks end alike"
    assert resumed[0][1] != ended[0][1]


@each_backend
def test_what_is_loaded_is_what_was_saved_and_a_cut_file_is_passed_over(backend: str, tmp_path: Path) -> None:
    assert run_check(2, backend, "keras_checkpoints:save_and_load", tmp_path) == [{"best": 0.5}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_elastic_states_are_saved_and_loaded(backend: str, tmp_path: Path) -> None:
    run_check(2, backend, "keras_checkpoints:states", tmp_path)
