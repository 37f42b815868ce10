"""Collectives of hvdkit.tensorflow, eagerly and inside a tf.function: results, gradients, errors."""

from __future__ import annotations

import re

import pytest
from keras_ranks import run_check

pytestmark = [pytest.mark.ranks, pytest.mark.keras("tensorflow")]

each_mode = pytest.mark.parametrize("mode", ["eager", "graph", "session"])


@each_mode
def test_allreduce(mode: str) -> None:
    run_check(3, "tensorflow", "tensorflow_collectives:every_kind_of_reduction", mode)


@pytest.mark.slow
@each_mode
def test_the_other_collectives(mode: str) -> None:
    run_check(3, "tensorflow", "tensorflow_collectives:every_other_collective", mode)


@each_mode
def test_gradients(mode: str) -> None:
    run_check(3, "tensorflow", "tensorflow_collectives:gradients", mode)


@pytest.mark.slow
@each_mode
def test_indexed_slices(mode: str) -> None:
    run_check(3, "tensorflow", "tensorflow_collectives:sparse", mode)


@pytest.mark.slow
@each_mode
def test_process_sets_and_objects(mode: str) -> None:
    run_check(3, "tensorflow", "tensorflow_collectives:sets", mode)


@pytest.mark.slow
@pytest.mark.native("Horovod names neither ranks nor hosts")
def test_errors_name_what_and_who() -> None:
    run_check(3, "tensorflow", "tensorflow_collectives:errors")


@pytest.mark.slow
@each_mode
def test_join(mode: str, engine: str) -> None:
    # Horovod's core answers a join in the second world of a process too early.
    fresh = engine == "horovod"
    found = run_check(3, "tensorflow", "tensorflow_collectives:uneven_batches", mode, fresh=fresh)
    assert found == [[3], [3, 2], [3, 2, 1]]


@pytest.mark.slow
def test_operations_of_a_plain_graph_meet_in_any_order() -> None:
    run_check(3, "tensorflow", "tensorflow_graphs:any_order")


@pytest.mark.slow
def test_gradients_of_a_function_meet_in_any_order() -> None:
    run_check(3, "tensorflow", "tensorflow_graphs:gradients_in_any_order")


@pytest.mark.slow
def test_sessions() -> None:
    run_check(3, "tensorflow", "tensorflow_graphs:in_sessions")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["as_one_process", "at_once", "refused"])
def test_optimizers_of_sessions(case: str) -> None:
    run_check(3, "tensorflow", f"tensorflow_sessions:{case}")


@pytest.mark.native("Horovod's core has no buckets")
def test_calls_of_one_function_in_one_run_of_a_session_take_turns() -> None:
    said = run_check(3, "tensorflow", "tensorflow_sessions:one_function_twice")
    cured = [re.search(r"two calls of one tf.function.*control_dependencies", text) is not None for text in said]
    assert any(cured), said
    assert all(cure or "has shut hvdkit down" in text for cure, text in zip(cured, said, strict=True)), said


def test_names_are_given_when_a_function_is_traced() -> None:
    run_check(3, "tensorflow", "tensorflow_graphs:traced_names")


@pytest.mark.slow
@each_mode
def test_errors_are_those_of_horovod(mode: str) -> None:
    run_check(3, "tensorflow", "tensorflow_graphs:classes_of_errors", mode)


def test_each_graph_that_fails_raises_its_own_error() -> None:
    run_check(2, "tensorflow", "tensorflow_graphs:failures_at_once")


@pytest.mark.native(
    "Horovod's core names tensors by the group's size and waits where the sizes differ, as Horovod does"
)
@each_mode
def test_groups_of_different_sizes_are_an_error(mode: str) -> None:
    run_check(3, "tensorflow", "tensorflow_graphs:groups_of_different_sizes", mode)


@pytest.mark.slow
def test_one_thread_of_tensorflow_is_enough() -> None:
    # TensorFlow has as many threads for functions as the process has cores: one where the launcher binds to cores.
    env = {"TF_NUM_INTEROP_THREADS": "1"}
    assert run_check(2, "tensorflow", "tensorflow_graphs:sum_in_a_function", env=env) == [3.0, 3.0]
