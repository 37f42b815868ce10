"""hvd.BalancedDataset of Keras, on each backend."""

from __future__ import annotations

import pytest
from keras_ranks import each_backend, run_check

pytestmark = [pytest.mark.ranks, pytest.mark.native("Horovod's core reduces what comes to it unweighted")]


@each_backend
def test_unequal_rows_train_as_one_process_with_the_whole_batch(backend: str) -> None:
    for slow, recovered in run_check(3, backend, "keras_balanced:as_one_process"):
        assert slow == (6, 5, 1)
        assert recovered[2] > slow[2]


@each_backend
def test_an_evaluation_does_not_change_the_order_of_training(backend: str) -> None:
    run_check(1, backend, "keras_balanced:evaluates_between_epochs")


@each_backend
def test_misuse_is_refused_with_its_cure(backend: str) -> None:
    run_check(3, backend, "keras_balanced:misuse")
    if backend == "torch":
        run_check(3, backend, "keras_balanced:weights_anew")
