"""TensorFlow's gradients of GPUs, over a stand-in for CUDA and NCCL in host memory: nothing here ran on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from keras_ranks import run_check
from stand_in import find_compiler

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.keras("tensorflow"),
    pytest.mark.native("NCCL is not in Horovod's core here"),
    pytest.mark.skipif(find_compiler() is None, reason="no C compiler for the stand-in; run: apt-get install gcc"),
]

each_mode = pytest.mark.parametrize("mode", ["eager", "graph"])


def _check(size: int, file: str, check: str, *args: Any) -> None:
    run_check(size, "tensorflow", "tensorflow_gpu:on_gpu", file, check, *args, timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["graph", pytest.param("eager", marks=pytest.mark.slow)])
def test_ranks_train_as_one_process(mode: str) -> None:
    _check(2, "tensorflow_training", "as_one_process", mode, ["SGD"])


@pytest.mark.parametrize("mode", ["eager", pytest.param("graph", marks=pytest.mark.slow)])
def test_profile_and_timeline_have_the_gpus_times(mode: str, tmp_path: Path) -> None:
    run_check(2, "tensorflow", "tensorflow_gpu:record", str(tmp_path), mode)


@pytest.mark.slow
def test_a_failure_of_nccl_is_raised_by_this_step_and_later_ones() -> None:
    run_check(2, "tensorflow", "tensorflow_gpu:nccl_fails")


@pytest.mark.slow
@each_mode
@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_compression_costs_no_more_than_its_bits(mode: str, wire: str) -> None:
    _check(3, "tensorflow_training", "as_one_process", mode, ["SGD"], "auto", {"compression": wire})


@pytest.mark.slow
@each_mode
@pytest.mark.parametrize("check", ["accumulation", "embedding", "partial", "sets_and_several_tapes"])
def test_in_particular(check: str, mode: str) -> None:
    _check(3, "tensorflow_training", check, mode)


@pytest.mark.slow
@each_mode
@pytest.mark.parametrize("sparse", [False, True])
def test_a_joined_rank_counts_as_zeros(mode: str, sparse: bool) -> None:
    _check(3, "tensorflow_training", "join", mode, sparse)


@pytest.mark.slow
@each_mode
def test_what_only_some_ranks_have_is_averaged_over_all(mode: str) -> None:
    _check(3, "tensorflow_behaviour", "missing_gradients", mode)


@pytest.mark.slow
def test_a_graph_that_was_traced_without_a_gradient_names_it() -> None:
    _check(2, "tensorflow_behaviour", "another_gradient_later")


@pytest.mark.slow
@pytest.mark.parametrize("check", ["device_numbers", "devices_of_variables", "not_all_on_gpus", "other_worlds"])
def test_which_gpu_it_is(check: str) -> None:
    run_check(2, "tensorflow", f"tensorflow_gpu:{check}")


@pytest.mark.slow
@pytest.mark.parametrize("check", ["frozen_layers", "two_optimizers", "sum_of_gradients"])
def test_keras(check: str) -> None:
    _check(2, "keras_training", check)
