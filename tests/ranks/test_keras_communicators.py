"""A part of the job trains with Keras as one process would; the other ranks of the job never call hvdkit."""

from __future__ import annotations

import pytest
from keras_ranks import each_backend, run_check


@pytest.mark.slow
@pytest.mark.ranks
@each_backend
def test_a_part_trains_as_one_process(backend: str) -> None:
    run_check(3, backend, "keras_training:in_a_part", {"name": "SGD", "learning_rate": 0.05, "momentum": 0.9})


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.keras("tensorflow")
def test_a_part_trains_through_the_tape_as_one_process() -> None:
    run_check(3, "tensorflow", "tensorflow_training:in_a_part", "graph")
