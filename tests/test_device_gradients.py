"""Gradients of GPUs, over a stand-in for CUDA and NCCL in host memory: nothing here ran on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_world import train_on_gpus
from ranks import run_ranks
from stand_in import find_compiler
from torch_world import Case, assert_alike, train_here

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(find_compiler() is None, reason="no C compiler for the stand-in; run: apt-get install gcc"),
]

ADAM = {"lr": 0.01}


def _check(case: Case, size: int, tolerance: float, **more: Any) -> None:
    assert_alike(run_ranks(size, train_on_gpus, case, **more), train_here(case, size), tolerance)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float64", 1e-10)])
def test_ranks_train_as_one_process(dtype: str, tolerance: float) -> None:
    _check(Case("Adam", ADAM, dtype=dtype), 3, tolerance)


def test_buckets_of_any_size_accumulation_and_clipping() -> None:
    _check(Case(passes=3, clip=0.3), 2, 1e-10, settings={"fusion_bytes": 256})


@pytest.mark.parametrize("compression, tolerance", [("fp16", 5e-3), ("bf16", 5e-2)])
def test_compression_costs_no_more_than_its_bits(compression: str, tolerance: float) -> None:
    _check(Case(dtype="float32"), 3, tolerance, compression=compression)
