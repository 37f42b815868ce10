"""Learning rates for large batches: how far to raise them, and how to get there."""

from __future__ import annotations

import math


def linear_scale(batch_size: int, *, reference: int) -> float:
    """Factor on the learning rate by the linear rule: a batch k times as large takes a step k times as large.

    batch_size: samples of all ranks together in one step. reference: batch size that the learning rate was tuned for.
    Source: Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv:1706.02677, section 2.1; for SGD, and only
    up to some thousand samples.
    """
    _check(batch_size, reference)
    return batch_size / reference


def square_root_scale(batch_size: int, *, reference: int) -> float:
    """Factor on the learning rate by the square-root rule, which keeps the variance of a step; usual for Adam.

    batch_size, reference: as for `linear_scale`.
    Sources: Krizhevsky, "One weird trick", 2014, arXiv:1404.5997, section 5; for adaptive methods Malladi et al.,
    "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", 2022, arXiv:2205.10287.
    """
    _check(batch_size, reference)
    return math.sqrt(batch_size / reference)


def warmup_multiplier(epoch: float, *, factor: float, warmup_epochs: float) -> float:
    """Multiplier on the scaled learning rate: a straight line from 1 / factor at epoch 0 to 1 at `warmup_epochs`.

    So training begins with the learning rate that was tuned for the reference batch.

    epoch: fractional, 2.5 is half way through the third. factor: what the learning rate was scaled by.
    warmup_epochs: 0 for no warm-up.
    Source: "gradual warmup", Goyal et al., 2017, arXiv:1706.02677, section 2.2, which takes 5 epochs.
    """
    if not factor > 0:
        raise ValueError(f"factor is {factor}; it must be above 0")
    if warmup_epochs < 0:
        raise ValueError(f"warmup_epochs is {warmup_epochs}; it must be 0 or more")
    if epoch >= warmup_epochs:
        return 1.0
    done = max(epoch, 0.0) / warmup_epochs
    return done + (1.0 - done) / factor


def _check(batch_size: int, reference: int) -> None:
    if batch_size < 1 or reference < 1:
        raise ValueError(f"batch_size is {batch_size} and reference {reference}; both must be 1 or more")
