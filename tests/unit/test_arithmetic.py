"""Adding, scaling and casting: every dtype, against plain formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.transport.arithmetic import NumpyArithmetic
from hvdkit.transport.buffer import HALF, STORAGE, Array, Buffer, Op, make_buffer

ARITHMETIC = NumpyArithmetic()
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
OPS: tuple[Op, ...] = ("sum", "min", "max", "product")
SEVERAL_CHUNKS = 300_001


def buffer_of(values: Any, dtype: str) -> Buffer:
    """A new buffer with these numbers, rounded to `dtype`."""
    wide = np.asarray(values, np.float64)
    if dtype != "bfloat16":
        with np.errstate(all="ignore"):
            return Buffer(wide.astype(STORAGE[dtype]), dtype)
    different, index = np.unique(wide, return_inverse=True)
    return Buffer(np.array([nearest_bfloat16(value) for value in different], np.uint16)[index], dtype)


def nearest_bfloat16(value: float) -> int:
    """The bits of the bfloat16 nearest to a float32 number, found by comparing its two neighbours."""
    bits = int(np.float32(value).view(np.uint32))
    if math.isnan(value) or math.isinf(value) or bits & 0xFFFF == 0:
        return bits >> 16 | (0x40 if math.isnan(value) else 0)
    below, above = bits >> 16, (bits >> 16) + 1
    middle = bits & 0xFFFF
    if middle == 0x8000:
        return below if below % 2 == 0 else above
    return below if middle < 0x8000 else above


def numbers(buffer: Buffer) -> Array:
    """The values of a buffer; bfloat16 as float32."""
    if buffer.dtype == "bfloat16":
        return (buffer.array.astype(np.uint32) << 16).view(np.float32)
    return buffer.array


def reduced(values: list[Array], op: Op) -> Array:
    """The reduction in the order of `values`, in their dtype."""
    function = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}[op]
    total = values[0]
    with np.errstate(all="ignore"):
        for value in values[1:]:
            total = function(total, value)
    return total


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", (*INTEGERS, *FLOATS))
@pytest.mark.parametrize("count", (0, 1, 7, SEVERAL_CHUNKS))
def test_combine_is_the_plain_formula(dtype: str, op: Op, count: int) -> None:
    generator = np.random.default_rng(count)
    sources = [buffer_of(generator.integers(0, 7, count), dtype) for _ in range(3)]
    out = make_buffer(count, dtype)
    ARITHMETIC.combine(out, sources, op)
    np.testing.assert_array_equal(numbers(out), reduced([numbers(source) for source in sources], op))


@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16", "int32"))
@pytest.mark.parametrize("which", (0, 1, 2, 3))
def test_out_may_be_any_source_and_does_not_change_the_order(dtype: str, which: int) -> None:
    generator = np.random.default_rng(1)
    values = [generator.standard_normal(5_000) * 100 for _ in range(4)]
    sources = [buffer_of(value, dtype) for value in values]
    expected = make_buffer(5_000, dtype)
    ARITHMETIC.combine(expected, sources)
    ARITHMETIC.combine(sources[which], sources)
    np.testing.assert_array_equal(sources[which].array, expected.array)


def test_out_that_is_a_late_source_is_right_in_every_chunk() -> None:
    sources = [buffer_of(np.arange(SEVERAL_CHUNKS) * factor, "float64") for factor in (1, 2, 4)]
    ARITHMETIC.combine(sources[2], sources, scale=0.5)
    np.testing.assert_array_equal(sources[2].array, np.arange(SEVERAL_CHUNKS) * 3.5)


@pytest.mark.parametrize("dtype", sorted(HALF))
def test_half_sums_round_once(dtype: str) -> None:
    # Each small term alone is lost against the large one at half precision, but not their sum.
    large = 2048.0 if dtype == "float16" else 256.0
    sources = [buffer_of([value], dtype) for value in (large, 0.75, 0.75)]
    out = make_buffer(1, dtype)
    ARITHMETIC.combine(out, sources)
    assert numbers(out)[0] == large + 2


def test_scale_is_applied_before_half_rounding() -> None:
    sources = [buffer_of([60000.0], "float16"), buffer_of([60000.0], "float16")]
    out = make_buffer(1, "float16")
    ARITHMETIC.combine(out, sources, scale=0.5)
    assert out.array[0] == np.float16(60000.0)
    ARITHMETIC.combine(out, sources)
    assert np.isinf(out.array[0])


@pytest.mark.parametrize("op, expected", [("sum", [0, 1, 1]), ("max", [0, 1, 1]), ("min", [0, 0, 1])])
def test_bools_are_joined(op: Op, expected: list[int]) -> None:
    out = make_buffer(3, "bool")
    ARITHMETIC.combine(out, [buffer_of([0, 0, 1], "bool"), buffer_of([0, 1, 1], "bool")], op)
    np.testing.assert_array_equal(out.array, np.array(expected, bool))


def test_product_of_bools_is_and() -> None:
    out = make_buffer(2, "bool")
    ARITHMETIC.combine(out, [buffer_of([1, 1], "bool"), buffer_of([0, 1], "bool")], "product")
    assert out.array.tolist() == [False, True]


def test_integers_wrap() -> None:
    out = make_buffer(1, "int8")
    ARITHMETIC.combine(out, [buffer_of([127], "int8"), buffer_of([1], "int8")])
    assert out.array[0] == -128


def test_one_source_is_scaled_or_copied() -> None:
    source = buffer_of(np.arange(5), "float32")
    out = make_buffer(5, "float32")
    ARITHMETIC.combine(out, [source])
    np.testing.assert_array_equal(out.array, source.array)
    ARITHMETIC.combine(source, [source], scale=2.0)
    np.testing.assert_array_equal(source.array, np.arange(5) * 2)


@pytest.mark.parametrize("source", (buffer_of([1], "float32"), buffer_of([1, 2], "float64")))
def test_unlike_buffers_are_refused(source: Buffer) -> None:
    with pytest.raises(ValueError, match="must be equal"):
        ARITHMETIC.combine(make_buffer(2, "float32"), [buffer_of([1, 2], "float32"), source])


def test_integers_are_not_scaled() -> None:
    with pytest.raises(ValueError, match="int32"):
        ARITHMETIC.combine(make_buffer(1, "int32"), [buffer_of([1], "int32")], scale=0.5)


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_cast_to_bfloat16_takes_the_nearest(values: list[float]) -> None:
    out = make_buffer(len(values), "bfloat16")
    ARITHMETIC.cast(out, buffer_of(values, "float32"))
    for value, bits in zip(values, out.array, strict=True):
        if math.isnan(value):
            assert math.isnan(numbers(Buffer(np.array([bits]), "bfloat16"))[0])
        elif math.isfinite(value):
            assert int(bits) == min(nearest_bfloat16(abs(value)), 0x7F7F) | (
                0x8000 if math.copysign(1, value) < 0 else 0
            )
        else:
            assert int(bits) == nearest_bfloat16(value)


@given(st.lists(st.floats(width=64), min_size=1, max_size=20), st.sampled_from(FLOATS), st.sampled_from(FLOATS))
def test_cast_keeps_inf_and_nan_and_clamps_the_rest(values: list[float], source: str, target: str) -> None:
    given_ = buffer_of(np.clip(values, -3e38, 3e38) if source == "bfloat16" else values, source)
    out = make_buffer(len(values), target)
    ARITHMETIC.cast(out, given_)
    before, after = numbers(given_).astype(np.float64), numbers(out).astype(np.float64)
    np.testing.assert_array_equal(np.isnan(before), np.isnan(after))
    np.testing.assert_array_equal(np.isinf(before), np.isinf(after))
    largest = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}.get(target)
    step = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 0.0}[target]
    finite = np.isfinite(before)
    clamped = np.clip(before[finite], -largest, largest) if largest else before[finite]
    tiny = {"float16": 2.0**-25, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 0.0}[target]
    assert np.all(np.abs(after[finite] - clamped) <= np.maximum(np.abs(clamped) * step * 1.01, tiny * 1.01))


@given(st.integers(0, 0xFFFF), st.sampled_from(sorted(HALF)))
def test_half_to_float32_and_back_changes_nothing(bits: int, dtype: str) -> None:
    half = Buffer(np.array([bits], np.uint16).view(STORAGE[dtype]), dtype)
    wide, back = make_buffer(1, "float32"), make_buffer(1, dtype)
    ARITHMETIC.cast(wide, half)
    ARITHMETIC.cast(back, wide)
    if np.isnan(numbers(half)[0]):
        assert np.isnan(numbers(back)[0])
    else:
        assert back.array.tobytes() == half.array.tobytes()


def test_every_float16_is_widened_to_itself() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    wide = make_buffer(halves.size, "float32")
    ARITHMETIC.cast(wide, Buffer(halves, "float16"))
    np.testing.assert_array_equal(wide.array.view(np.uint32), halves.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("target", ("float16", "bfloat16", "float32"))
def test_a_scale_that_exceeds_the_range_is_clamped(target: str) -> None:
    source = buffer_of([3e38, -3e38, math.inf, 0.0], "float32")
    out = make_buffer(4, target)
    ARITHMETIC.cast(out, source, 1e10)
    values = numbers(out).astype(np.float64)
    assert np.isfinite(values[:2]).all() and values[0] == -values[1] > 6e4
    assert values[2] == math.inf and values[3] == 0


def test_a_long_cast_is_right_in_every_chunk() -> None:
    source = buffer_of(np.arange(SEVERAL_CHUNKS) % 2048, "float32")
    half = make_buffer(SEVERAL_CHUNKS, "float16")
    ARITHMETIC.cast(half, source, 0.5)
    np.testing.assert_array_equal(half.array, source.array / 2)
    double = make_buffer(SEVERAL_CHUNKS, "float64")
    ARITHMETIC.cast(double, half)
    np.testing.assert_array_equal(double.array, source.array / 2)


def test_integers_can_be_cast_to_floats_only() -> None:
    out = make_buffer(2, "float16")
    ARITHMETIC.cast(out, buffer_of([3, 100_000], "int32"))
    assert out.array.tolist() == [3.0, 65504.0]
    with pytest.raises(TypeError, match="floating point"):
        ARITHMETIC.cast(make_buffer(2, "int32"), out)


def test_copy_moves_numbers() -> None:
    out = make_buffer(3, "int64")
    ARITHMETIC.copy(out, buffer_of([1, 2, 3], "int64"))
    assert out.array.tolist() == [1, 2, 3]
