"""Keras on PyTorch with process groups of torch: by Gloo on the CPU, with the code that reduces gradients of GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from keras_ranks import run_check

pytestmark = [pytest.mark.ranks, pytest.mark.native("device memory is reduced by hvdkit's own engine")]


def test_ranks_train_as_one_process() -> None:
    run_check(3, "torch", "keras_device:train")


@pytest.mark.slow
def test_profile_and_timeline_have_the_times_of_every_step(tmp_path: Path) -> None:
    run_check(3, "torch", "keras_device:record", str(tmp_path))
