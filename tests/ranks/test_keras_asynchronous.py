"""hvd.AsynchronousOptimizer and hvd.BackupSteps of Keras, on each backend."""

from __future__ import annotations

import pytest
from keras_ranks import each_backend, run_check

pytestmark = [pytest.mark.ranks, pytest.mark.native("Horovod's core has no messages")]


@each_backend
def test_ranks_with_uneven_steps_end_alike(backend: str) -> None:
    run_check(2, backend, "keras_asynchronous:uneven_steps")


@each_backend
def test_a_rank_without_a_step_ends_like_the_others(backend: str) -> None:
    run_check(2, backend, "keras_asynchronous:no_step")


@each_backend
@pytest.mark.parametrize("kind", [pytest.param("staleness", marks=pytest.mark.slow), "backup"])
def test_it_is_the_training_of_one_process(backend: str, kind: str) -> None:
    run_check(2, backend, "keras_asynchronous:as_one_process", kind)
