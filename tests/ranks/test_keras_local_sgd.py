"""hvd.LocalSGD and hvd.DiLoCo of Keras, on each backend."""

from __future__ import annotations

import pytest
from keras_ranks import each_backend, run_check

pytestmark = pytest.mark.ranks


@pytest.mark.native("nothing here depends on the engine")
@each_backend
@pytest.mark.parametrize(
    ("every", "fragments", "overlap", "start_after"),
    [
        (3, 2, 1, 2),
        pytest.param(3, 1, 0, 0, marks=pytest.mark.slow),
    ],
)
def test_ranks_train_as_numpy(backend: str, every: int, fragments: int, overlap: int, start_after: int) -> None:
    run_check(2, backend, "keras_local_sgd:simulated", every, fragments, overlap, start_after)


@pytest.mark.native("nothing here depends on the engine")
@each_backend
def test_in_particular(backend: str) -> None:
    run_check(2, backend, "keras_local_sgd:in_particular")
