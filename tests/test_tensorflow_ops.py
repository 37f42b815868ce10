"""Collectives of hvdkit.tensorflow, eagerly and inside a tf.function: results, gradients, errors."""

from __future__ import annotations

import pytest
from keras_ranks import run_check

pytestmark = [pytest.mark.ranks, pytest.mark.keras("tensorflow")]

each_mode = pytest.mark.parametrize("mode", ["eager", "graph"])


@each_mode
def test_allreduce(mode: str) -> None:
    run_check(3, "tensorflow", "tensorflow_collectives:every_kind_of_reduction", mode)


@each_mode
def test_the_other_collectives(mode: str) -> None:
    run_check(3, "tensorflow", "tensorflow_collectives:every_other_collective", mode)


@each_mode
def test_gradients(mode: str) -> None:
    run_check(3, "tensorflow", "tensorflow_collectives:gradients", mode)


@each_mode
def test_indexed_slices(mode: str) -> None:
    run_check(3, "tensorflow", "tensorflow_collectives:sparse", mode)


@each_mode
def test_process_sets_and_objects(mode: str) -> None:
    run_check(3, "tensorflow", "tensorflow_collectives:sets", mode)


@pytest.mark.native("Horovod names neither ranks nor hosts")
def test_errors_name_what_and_who() -> None:
    run_check(3, "tensorflow", "tensorflow_collectives:errors")


@each_mode
def test_join(mode: str, engine: str) -> None:
    # Horovod's core answers a join in the second world of a process too early.
    fresh = engine == "horovod"
    found = run_check(3, "tensorflow", "tensorflow_collectives:uneven_batches", mode, fresh=fresh)
    assert found == [[3], [3, 2], [3, 2, 1]]
