"""Averages in 16 bits: what the dtype holds is not lost on the way, and an average that it holds is not infinite."""

from __future__ import annotations

import pytest
import torch
from cases import quick_ones
from ranks import run_ranks
from torch_world import joined

import hvdkit.torch as hvd

pytestmark = pytest.mark.ranks

RANKS = 3
SMALLEST = 2.0**-24  # above 0, in float16
COUNTS = (RANKS, 60_000)  # sent at once, and through the ranks' memories
TRANSPORTS = pytest.mark.parametrize(
    "transport",
    quick_ones(["auto", "mpi", "hierarchical_pairs", "hierarchical_uneven"], "auto", "hierarchical_uneven"),
)


def _large(transport: str) -> None:
    with joined(transport):
        for count in COUNTS:
            for values in (torch.full((count,), 60_000.0), torch.full((count,), 65_504.0)):
                for dtype in (torch.float32, torch.float64):
                    average = hvd.allreduce(values.to(dtype), compression=hvd.Compression.fp16)
                    torch.testing.assert_close(average, values.to(dtype), rtol=2**-10, atol=0)
                scaled = hvd.allreduce(
                    values, compression=hvd.Compression.fp16, prescale_factor=64, postscale_factor=1 / 64
                )
                torch.testing.assert_close(scaled, values, rtol=2**-10, atol=0)
                torch.testing.assert_close(hvd.allreduce(values.half()), values.half(), rtol=2**-10, atol=0)
                part = hvd.reducescatter(values, compression=hvd.Compression.fp16)
                torch.testing.assert_close(part, values[: count // RANKS], rtol=2**-10, atol=0)


@TRANSPORTS
def test_an_average_that_float16_holds_is_finite(transport: str) -> None:
    run_ranks(RANKS, _large, transport)


def _bfloat16(transport: str) -> None:
    with joined(transport):
        for count in COUNTS:
            for value in (3e38, 1e-37):
                values = torch.full((count,), value)
                for average in (
                    hvd.allreduce(values, compression=hvd.Compression.bf16),
                    hvd.grouped_allreduce([values, values], compression=hvd.Compression.bf16)[1],
                ):
                    torch.testing.assert_close(average, values, rtol=2**-7, atol=0)


@pytest.mark.native("Horovod adds no bfloat16")
@TRANSPORTS
def test_an_average_that_bfloat16_holds_is_neither_infinite_nor_0(transport: str) -> None:
    run_ranks(RANKS, _bfloat16, transport)


def _tiny(transport: str) -> None:
    with joined(transport):
        for count in COUNTS:
            same = SMALLEST * (torch.arange(count) % 5)
            alone = torch.full((count,), RANKS * SMALLEST if hvd.rank() == RANKS - 1 else 0.0)
            for values, expected in ((same, same), (alone, torch.full((count,), SMALLEST))):
                average = hvd.allreduce(values, compression=hvd.Compression.fp16)
                torch.testing.assert_close(average, expected, rtol=0, atol=0)
                part = hvd.reducescatter(values, compression=hvd.Compression.fp16)
                each = count // RANKS
                torch.testing.assert_close(part, expected[hvd.rank() * each :][:each], rtol=0, atol=0)


@pytest.mark.native("Horovod's core rounds its sums to float16 before they are divided")
@TRANSPORTS
def test_an_average_that_float16_holds_is_not_0(transport: str) -> None:
    run_ranks(RANKS, _tiny, transport)


def _gradients(transport: str) -> None:
    with joined(transport):
        parameter = torch.nn.Parameter(torch.zeros(COUNTS[1]))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], 1.0), compression=hvd.Compression.fp16)
        for value in (60_000.0, 4 * SMALLEST):
            optimizer.zero_grad()
            (parameter.sum() * value).backward()
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, torch.full_like(parameter, value), rtol=2**-10, atol=0)


@pytest.mark.native("Horovod's core rounds its sums to float16 before they are divided")
@TRANSPORTS
def test_gradients_that_float16_holds_are_averaged(transport: str) -> None:
    run_ranks(RANKS, _gradients, transport)


def _factors() -> None:
    with joined():
        for count in COUNTS:
            for dtype in (torch.float16, torch.bfloat16):
                for factor in (0.0, -0.25, -3.0):
                    scaled = hvd.allreduce(torch.ones(count, dtype=dtype), op=hvd.Sum, postscale_factor=factor)
                    assert (scaled == RANKS * factor).all()


@pytest.mark.native("Horovod adds no bfloat16")
def test_factors_of_16_bits_may_be_0_or_negative() -> None:
    run_ranks(RANKS, _factors)
