"""Trained through the tape on several ranks, a model is what one process with the whole batch would have made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from keras_ranks import run_check

from hvdkit.transport.coding.top_k import TopK

pytestmark = [pytest.mark.ranks, pytest.mark.keras("tensorflow")]

each_mode = pytest.mark.parametrize("mode", ["eager", "graph"])


@each_mode
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_train_as_one_process(size: int, mode: str) -> None:
    run_check(size, "tensorflow", "tensorflow_training:as_one_process", mode, ["SGD", "Adam", "AdamW"])


BFLOAT16 = pytest.param(
    {"compression": "bf16", "gradient_predivide_factor": 2.0}, marks=pytest.mark.native("Horovod adds no bfloat16")
)

# All numbers are sent, each with its place: what is left to go wrong is the coding's own.
CODED = pytest.param({"compression": {"*": TopK(1.0)}}, marks=pytest.mark.native("Horovod's core has no codings"))


@pytest.mark.slow
@each_mode
@pytest.mark.parametrize("options", [{"compression": "fp16"}, BFLOAT16, CODED], ids=["fp16", "bf16", "coded"])
def test_compression_between_hosts_costs_little(mode: str, options: dict[str, Any]) -> None:
    run_check(3, "tensorflow", "tensorflow_training:as_one_process", mode, ["SGD"], "hierarchical_uneven", options)


@pytest.mark.slow
@each_mode
def test_accumulation(mode: str) -> None:
    run_check(2, "tensorflow", "tensorflow_training:accumulation", mode)


@pytest.mark.slow
def test_all_ranks_skip_the_step_in_which_one_overflows() -> None:
    run_check(2, "tensorflow", "tensorflow_training:mixed_precision")


@pytest.mark.slow
@each_mode
@pytest.mark.parametrize("check", ["embedding", "partial", "model_parallel", "sets_and_several_tapes"])
def test_in_particular(check: str, mode: str) -> None:
    run_check(3, "tensorflow", f"tensorflow_training:{check}", mode)


@pytest.mark.slow
@pytest.mark.native("Horovod's join is of the set of all ranks, and of allreduces")
@each_mode
@pytest.mark.parametrize("sparse", [False, True])
def test_a_joined_rank_counts_as_zeros(mode: str, sparse: bool) -> None:
    run_check(3, "tensorflow", "tensorflow_training:join", mode, sparse, timeout=60)


@pytest.mark.slow
@pytest.mark.native("Horovod's core tunes itself")
@each_mode
def test_gradients_are_right_while_the_engine_is_tuned(mode: str, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    run_check(2, "tensorflow", "tensorflow_training:tuned", mode, str(log))
    assert mode == "eager" or 3 <= len(log.read_text().splitlines()) <= 7
