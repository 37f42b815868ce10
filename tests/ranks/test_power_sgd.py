"""PowerSGD works on weight matrices: what has its rank is sent whole, vectors exactly, in as many bytes as it says."""

from __future__ import annotations

import math
from typing import Any

import pytest
from keras_ranks import each_backend, run_check
from low_rank import CODING, SHAPES, with_torch
from ranks import run_ranks

from hvdkit.engine.planned.plan import TensorSpec, plan_buckets
from hvdkit.engine.request import ReduceOptions
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.coding.api import Matrix
from hvdkit.transport.coding.power_sgd import matrix_shape
from hvdkit.transport.shared.buckets import plan_shards

pytestmark = [pytest.mark.ranks, pytest.mark.native("Horovod's core has no codings")]

CODED = [math.prod(shape) for shape in SHAPES if CODING.codes(shape)]
FACTORS = sum(4 * 8 * sum(matrix_shape(shape)) for shape in SHAPES if CODING.codes(shape))
EXACT = sum(4 * math.prod(shape) for shape in SHAPES if not CODING.codes(shape))


@pytest.mark.parametrize(
    ("ranks", "transport", "settings", "hosts"),
    [
        (3, "mpi", {}, [[0], [1], [2]]),
        (3, "mpi", {"fusion_bytes": 4096, "buckets_in_flight": 2}, [[0], [1], [2]]),
        (3, "hierarchical_uneven", {}, [[0], [1]]),  # one rank of a host sends, as the other host has one
        (4, "hierarchical_pairs", {"fusion_bytes": 2**17}, [[0, 1], [2, 3]]),
    ],
)
def test_matrices_of_its_rank_are_sent_whole_in_the_bytes_of_the_rank(
    ranks: int, transport: str, settings: dict[str, Any], hosts: list[list[int]]
) -> None:
    sent = run_ranks(ranks, with_torch, transport, settings)
    for host in hosts:
        total = sum(sent[rank] for rank in host)
        assert FACTORS + EXACT <= total < FACTORS + EXACT + 500  # tensors begin at cache lines; one number marks each


@pytest.mark.slow
@pytest.mark.keras("tensorflow")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_matrices_of_tensorflow(mode: str) -> None:
    run_check(3, "tensorflow", "low_rank:with_tensorflow", mode)


@pytest.mark.slow
@each_backend
def test_matrices_of_keras(backend: str) -> None:
    run_check(2, backend, "low_rank:with_keras")


def test_coded_tensors_are_not_cut() -> None:
    tensors = [TensorSpec(str(at), math.prod(shape), "float32", shape=shape) for at, shape in enumerate(SHAPES)]
    wires = [ReduceOptions(wire=CODING).wire_for_tensor(one) for one in tensors]
    for limit in (0, 64, 20_000, 100_000, 2**30):
        buckets = plan_buckets(tensors, limit, wires)
        coded = [bucket for bucket in buckets if bucket.wire == CODING]
        lengths = [slot.stop - slot.start for bucket in coded for slot in bucket.slots]
        assert lengths == CODED[::-1], f"limit {limit}"
        assert all(len(bucket.slots) == 1 or bucket.data_count * 4 <= limit for bucket in coded), f"limit {limit}"


def test_shards_begin_with_a_matrix() -> None:
    matrices = (Matrix(0, 10, 16), Matrix(160, 100, 16), Matrix(1760, 1, 32), Matrix(1792, 10, 16))
    spec = BucketSpec("float32", 1957, wire=CODING, exact=5, matrices=matrices)
    assert plan_shards(spec, 1) == [(0, 1957)]
    assert plan_shards(spec, 2) == [(0, 1760), (1760, 1957)]
    assert plan_shards(spec, 3) == [(0, 160), (160, 1760), (1760, 1957)]


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((), (1, 1)),
        ((5,), (1, 5)),
        ((4, 5), (4, 5)),
        ((64, 32, 3, 3), (64, 288)),  # PyTorch: outputs, inputs, rows, columns
        ((3, 3, 32, 64), (288, 64)),  # TensorFlow and JAX: rows, columns, inputs, outputs
        ((512, 8, 64), (512, 512)),  # the queries of Keras's attention
        ((8, 64, 512), (512, 512)),
    ],
)
def test_a_tensor_is_seen_as_a_matrix(shape: tuple[int, ...], matrix: tuple[int, int]) -> None:
    assert matrix_shape(shape) == matrix
