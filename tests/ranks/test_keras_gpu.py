"""Keras on JAX over a stand-in for CUDA and NCCL in host memory: nothing here ran on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from keras_ranks import run_check
from stand_in import find_compiler

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.native("device memory is reduced by hvdkit's own engine"),
    pytest.mark.skipif(find_compiler() is None, reason="no C compiler for the stand-in; run: apt-get install gcc"),
]


@pytest.mark.slow
def test_gradients_of_jax_stay_on_the_gpu() -> None:
    run_check(2, "jax", "keras_gpu:train", {"global_clipnorm": 0.05})


@pytest.mark.slow
@pytest.mark.parametrize("option", [{"gradient_accumulation_steps": 2}, {"loss_scale_factor": 128.0}], ids=str)
def test_what_an_optimizer_does_on_jax(option: dict[str, Any]) -> None:
    run_check(2, "jax", "keras_gpu:train", option)


@pytest.mark.slow
@pytest.mark.parametrize("compression, tolerance", [("fp16", 5e-3), ("bf16", 5e-2)])
def test_compression_on_jax_costs_no_more_than_its_bits(compression: str, tolerance: float) -> None:
    run_check(3, "jax", "keras_gpu:train", {}, tolerance, compression)


def test_profile_and_timeline_have_the_gpus_times(tmp_path: Path) -> None:
    run_check(2, "jax", "keras_gpu:record", str(tmp_path))


@pytest.mark.slow
def test_a_failure_of_nccl_is_raised_by_this_step_and_later_ones() -> None:
    run_check(2, "jax", "keras_gpu:nccl_fails")


@pytest.mark.slow
@pytest.mark.parametrize(("option", "steps"), [({}, 12), ({"gradient_accumulation_steps": 2}, 6)], ids=str)
def test_buckets_on_jax_are_started_by_calls_of_their_own_and_waited_for_by_the_last(
    option: dict[str, Any], steps: int
) -> None:
    run_check(2, "jax", "keras_gpu:buckets", option, steps, env={"STAND_IN_PAUSE_US": "3000"})


@pytest.mark.slow
@pytest.mark.parametrize("check", ["apply_by_hand", "different_models", "coded", "moved", "interrupted"])
def test_in_particular_on_jax(check: str) -> None:
    run_check(2, "jax", f"keras_gpu:{check}")


def test_a_wish_that_is_unknown_or_of_another_framework_is_an_error() -> None:
    run_check(2, "jax", "keras_gpu:refused_wishes")
