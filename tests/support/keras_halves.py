"""Bodies for ranks: numbers of 16 bits, which each backend of Keras has its own way to add."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras_training import joined
from numbers_of_ranks import buffer_of, values_of

import hvdkit.keras as hvd
from hvdkit.transport.arithmetic import Arithmetic, NumpyArithmetic
from hvdkit.transport.buffer import Array, Buffer, make_buffer

COUNT = 300_001


def sum_and_cast() -> str:
    """Sums over ranks are made in float32 and rounded once. Returns the name of the arithmetic."""
    with joined():
        everyone = [np.random.default_rng(rank).standard_normal(COUNT) for rank in range(hvd.size())]
        arithmetic = hvd.global_process_set.group("a test").transport.arithmetic
        for dtype in ("float16", "bfloat16"):
            summed = hvd.allreduce(_narrow(everyone[hvd.rank()], dtype), op=hvd.Sum)
            total = np.asarray(np.sum([_wide(_narrow(one, dtype)) for one in everyone], axis=0, dtype=np.float32))
            np.testing.assert_array_equal(_wide(summed), _wide(_narrow(total, dtype)))
            _is_as_numpys(arithmetic, dtype)
        return type(arithmetic).__name__


def _narrow(values: Array, dtype: str) -> Any:
    return keras.ops.convert_to_tensor(values.astype(np.float32), dtype)


def _wide(values: Any) -> Array:
    return np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(values, "float32")))


def _is_as_numpys(arithmetic: Arithmetic, dtype: str) -> None:
    """The same numbers, with subnormal ones, those too large, inf and nan among them."""
    dice = np.random.default_rng(7)
    values = [dice.standard_normal(COUNT) * 10.0 ** dice.uniform(-9, 4, COUNT) for _ in range(3)]
    values[0][:3] = np.inf, -np.inf, np.nan
    sources = [buffer_of(one, dtype) for one in values]
    wide = buffer_of(values[0] * 10, "float32")

    def combine(scale: float, one: Arithmetic, out: Buffer) -> None:
        one.combine(out, sources, "sum", scale)

    def cast(source: Buffer, one: Arithmetic, out: Buffer) -> None:
        one.cast(out, source)

    for scale in (1.0, 0.5, 1 / 3):
        _compare(arithmetic, functools.partial(combine, scale), dtype)
    _compare(arithmetic, functools.partial(cast, sources[0]), "float32")
    _compare(arithmetic, functools.partial(cast, wide), dtype)


def _compare(arithmetic: Arithmetic, call: Callable[[Arithmetic, Buffer], None], dtype: str) -> None:
    found, expected = make_buffer(COUNT, dtype), make_buffer(COUNT, dtype)
    call(arithmetic, found)
    call(NumpyArithmetic(), expected)
    np.testing.assert_array_equal(values_of(found), values_of(expected))
