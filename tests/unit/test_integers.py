"""Averages and factors of integers, against fractions of Python's own integers."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numbers_of_ranks import INTEGERS

from hvdkit.engine.named.integers import finish_average, multiply, widen
from hvdkit.transport.arithmetic import NumpyArithmetic
from hvdkit.transport.buffer import Buffer, make_buffer


@given(st.data(), st.sampled_from(INTEGERS), st.integers(1, 7), st.sampled_from([1.0, 0.5, 0.25]))
def test_an_average_is_exact_and_drops_its_fraction(data: Any, dtype: str, size: int, postscale: float) -> None:
    least, most = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    number = st.sampled_from([least, least + 1, 0, 1, most - 1, most]) | st.integers(least, most)
    rows = [data.draw(st.lists(number, min_size=3, max_size=3)) for _ in range(size)]
    totals = [widen(Buffer(np.array(row, dtype), dtype), size) for row in rows]
    NumpyArithmetic().combine(totals[0], totals)
    out = make_buffer(3, dtype)
    finish_average(out, totals[0], size, postscale)
    sums = [sum(each) for each in zip(*rows, strict=True)]
    assert out.array.tolist() == [int(Fraction(total, size) * Fraction(postscale)) for total in sums]


@pytest.mark.parametrize("factor", [1 / 3, 0.75, -1.0, 1 / 300, 1e-20])
def test_a_factor_drops_the_fraction(factor: float) -> None:
    numbers = Buffer(np.array([-7, 100, -127], np.int8), "int8")
    multiply(numbers, factor)
    assert numbers.array.tolist() == [
        int(value * Fraction(factor).limit_denominator(1000)) for value in (-7, 100, -127)
    ]
