"""Adasum on ranks equals the formula of its paper, written out in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cases import product
from numpy.typing import NDArray
from ranks import run_ranks

from hvdkit.engine.adasum import adasum
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import Buffer, as_buffer
from hvdkit.transport.single import SingleTransport

Vector = NDArray[np.float64]

TRANSPORTS = ["mpi", "shared_memory", "hierarchical_pairs"]
SIZES = [1, 2, 3, 4]


def pair(one: Vector, other: Vector) -> Vector:
    dot, one_squared, other_squared = one @ other, one @ one, other @ other
    one_factor = 1 - dot / (2 * one_squared) if one_squared else 1.0
    other_factor = 1 - dot / (2 * other_squared) if other_squared else 1.0
    return one_factor * one + other_factor * other


def tree(vectors: Sequence[Vector]) -> Vector:
    """The binary tree of the paper; the last of an odd number goes up as it is."""
    while len(vectors) > 1:
        paired = [pair(*vectors[at : at + 2]) for at in range(0, len(vectors) - 1, 2)]
        vectors = [*paired, *vectors[len(vectors) // 2 * 2 :]]
    return vectors[0]


def vector(rank: int, index: int, count: int) -> Vector:
    return np.random.default_rng([7, rank, index]).normal(size=count) * 10.0 ** (index % 3)


def narrowed(values: Vector, dtype: str) -> NDArray[Any]:
    """The values as they lie in memory; bfloat16 cut off after its 8 bits of precision."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def widened(array: NDArray[Any], dtype: str) -> Vector:
    if dtype != "bfloat16":
        return array.astype(np.float64)
    return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


COUNTS = [1, 2, 5, 64, 1000, 70_001, 0, 3]
TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


def sums_of_many(transport: Transport) -> None:
    for dtype, tolerance in TOLERANCE.items():
        for counts in ([10], [3, 1], [1], [0], [], COUNTS):
            inputs = [
                [narrowed(vector(rank, index, count), dtype) for index, count in enumerate(counts)]
                for rank in range(transport.size)
            ]
            buffers = [Buffer(array.copy(), dtype) for array in inputs[transport.rank]]
            adasum(transport, buffers)
            for index, buffer in enumerate(buffers):
                expected = tree([widened(arrays[index], dtype) for arrays in inputs])
                got = widened(buffer.array, dtype)
                scale = np.abs(expected).max(initial=1e-30)
                np.testing.assert_allclose(got / scale, expected / scale, rtol=0, atol=tolerance, err_msg=dtype)


def sums_of_mixed_dtypes(transport: Transport) -> None:
    dtypes = ["float32", "float64", "float16", "float32", "bfloat16"]
    inputs = [
        [narrowed(vector(rank, at, 50 + at), dtype) for at, dtype in enumerate(dtypes)]
        for rank in range(transport.size)
    ]
    buffers = [Buffer(array.copy(), dtype) for array, dtype in zip(inputs[transport.rank], dtypes, strict=True)]
    adasum(transport, buffers)
    for at, (buffer, dtype) in enumerate(zip(buffers, dtypes, strict=True)):
        expected = tree([widened(arrays[at], dtype) for arrays in inputs])
        got = widened(buffer.array, dtype)
        np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE[dtype] * np.abs(expected).max())


def sums_of_special_vectors(transport: Transport) -> None:
    rank, size = transport.rank, transport.size
    same = np.arange(1.0, 9.0)
    orthogonal = np.zeros(8)
    orthogonal[rank] = rank + 1.0
    zero_but_on_rank_0 = same * (rank == 0)
    nothing = np.zeros(8)
    buffers = [as_buffer(array) for array in (same, orthogonal, zero_but_on_rank_0, nothing)]
    adasum(transport, buffers)
    np.testing.assert_allclose(same, np.arange(1.0, 9.0), rtol=1e-14)
    np.testing.assert_allclose(orthogonal, np.concatenate([np.arange(1.0, size + 1.0), np.zeros(8 - size)]))
    np.testing.assert_allclose(zero_but_on_rank_0, np.arange(1.0, 9.0))
    np.testing.assert_array_equal(nothing, np.zeros(8))


def sums_of_tiny_and_huge_vectors(transport: Transport) -> None:
    # Squares of these are no float32s: they would be 0 or inf.
    base = np.random.default_rng(3).normal(size=1024)
    for factors in ([1e-30, 2e-30, 3e-30, 4e-30], [1e25, 3e25, 1e25, 2e25], [1e-20, 1e19, 1e-5, 1.0]):
        inputs = [(base * factor).astype(np.float32) for factor in factors[: transport.size]]
        mine = inputs[transport.rank].copy()
        adasum(transport, [as_buffer(mine)])
        expected = tree([array.astype(np.float64) for array in inputs])
        error = np.linalg.norm((mine - expected) / np.abs(expected).max())
        assert error < 1e-5, (factors, error)


def a_tensor_does_not_depend_on_those_it_travels_with(transport: Transport) -> None:
    alone, together = ([vector(transport.rank, index, count) for index, count in enumerate(COUNTS)] for _ in range(2))
    for array in alone:
        adasum(transport, [as_buffer(array)])
    adasum(transport, [as_buffer(array) for array in together])
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def result(transport: Transport) -> NDArray[np.float32]:
    array = vector(transport.rank, 1, 12_345).astype(np.float32)
    adasum(transport, [as_buffer(array)])
    return array


def not_a_number_spoils_its_own_tensor_only(transport: Transport) -> None:
    spoiled, whole = np.ones(20), np.ones(20)
    if transport.rank == transport.size - 1:
        spoiled[3] = np.inf
    adasum(transport, [as_buffer(spoiled), as_buffer(whole)])
    assert not np.isfinite(spoiled).all()
    np.testing.assert_allclose(whole, np.ones(20))


CHECKS = {
    check.__name__: check
    for check in (
        sums_of_many,
        sums_of_mixed_dtypes,
        sums_of_special_vectors,
        sums_of_tiny_and_huge_vectors,
        a_tensor_does_not_depend_on_those_it_travels_with,
        not_a_number_spoils_its_own_tensor_only,
    )
}


@pytest.mark.ranks
# The quick cases have each pair of a check and a transport, and each number of ranks with every transport.
@pytest.mark.parametrize(
    ("size", "name", "check"),
    product(
        SIZES,
        TRANSPORTS,
        CHECKS,
        quick=lambda size, name, check: (
            size == SIZES[(TRANSPORTS.index(name) + list(CHECKS).index(check)) % len(SIZES)]
        ),
    ),
)
def test_adasum_is_that_of_the_paper(size: int, name: str, check: str) -> None:
    run_ranks(size, CHECKS[check], transport=name)


@pytest.mark.ranks
def test_every_rank_has_the_same_bits() -> None:
    for other in (results := run_ranks(3, result, transport="mpi"))[1:]:
        np.testing.assert_array_equal(results[0], other)


def test_integers_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(TypeError, match="Adasum needs floating-point tensors, not int32"):
        adasum(SingleTransport(), [as_buffer(np.ones(3)), as_buffer(np.ones(3, np.int32))])
