"""What surrounds training with Keras on ranks: files, callbacks, values, data."""

from __future__ import annotations

from pathlib import Path

import pytest
from keras_ranks import each_backend, each_backend_once_on_three, run_check

pytestmark = pytest.mark.ranks
_NO_ENGINE = pytest.mark.native("which rows a rank reads has nothing to do with the engine")


@pytest.mark.native("what a file holds has nothing to do with the engine")
@each_backend
@pytest.mark.parametrize("check", ["saved_and_loaded", "resumed", "progress"])
def test_files(backend: str, check: str, tmp_path: Path) -> None:
    run_check(2, backend, f"keras_loops:{check}", str(tmp_path))


@each_backend
@pytest.mark.parametrize(
    "check", ["early_stopping", "learning_rates", "local_variables", "momentum_correction", "elastic", "refused"]
)
def test_callbacks_and_state(backend: str, check: str) -> None:
    run_check(2, backend, f"keras_loops:{check}")


@each_backend_once_on_three
@pytest.mark.parametrize("check", ["one_rank_stops", "not_a_number", "ordered", "other_numbers_of_steps"])
def test_all_ranks_stop_together(backend: str, size: int, check: str) -> None:
    run_check(size, backend, f"keras_stops:{check}")


@pytest.mark.native("Horovod's core reports no waits for gradients")
@each_backend_once_on_three
@pytest.mark.parametrize("check", ["other_epochs", "shorter_generator"])
def test_ranks_with_other_numbers_of_batches(backend: str, size: int, check: str) -> None:
    run_check(size, backend, f"keras_stops:{check}")


@pytest.mark.slow
@each_backend_once_on_three
@pytest.mark.parametrize("check", ["all_ranks_stop", "stopped_from_elsewhere"])
def test_ways_to_stop(backend: str, size: int, check: str) -> None:
    run_check(size, backend, f"keras_stops:{check}")


@pytest.mark.slow
@pytest.mark.native("Horovod's core has no such strategies")
@each_backend_once_on_three
def test_ranks_that_meet_now_and_then_stop(backend: str, size: int) -> None:
    run_check(size, backend, "keras_stops:local_steps_stop")


@pytest.mark.parametrize("backend", ["tensorflow"])
def test_a_new_rank_begins_with_no_data(backend: str) -> None:
    run_check(2, backend, "keras_loops:replaced")


@each_backend_once_on_three
@pytest.mark.parametrize(
    "check", ["values", pytest.param("shards", marks=_NO_ENGINE), "metrics", pytest.param("views", marks=_NO_ENGINE)]
)
def test_values_and_data(backend: str, size: int, check: str) -> None:
    run_check(size, backend, f"keras_loops:{check}")
