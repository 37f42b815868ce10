"""DistributedOptimizer(shard=...) of Keras: the variables of one process, with a part of the state on each rank."""

from __future__ import annotations

import pytest
from keras_ranks import each_backend, run_check

pytestmark = [pytest.mark.ranks, pytest.mark.native("Horovod's core has no all-gather of buckets")]


@each_backend
def test_ranks_train_as_one_process(backend: str) -> None:
    run_check(2, backend, "keras_sharding:train", list(range(11)))
