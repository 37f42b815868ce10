"""Which samples a rank sees: an order that all ranks agree on without talking, and two ways to split it."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def plan_order(length: int, *, seed: int | None = 0, epoch: int = 0) -> Indices:
    """Order the samples of an epoch, the same on every rank and for any number of ranks.

    seed: 0 or more; with the epoch it decides the shuffling. None leaves the samples in order.
    Returns (length,), a permutation.
    """
    if seed is None:
        return np.arange(length, dtype=np.int64)
    # RandomState and not Generator: numpy promises that its stream never changes, so that ranks with different numpy
    # agree and a run can be resumed after an upgrade.
    generator = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(length).astype(np.int64)


def split_for_training(
    order: NDArray[Any], *, rank: int, size: int, uneven: Literal["pad", "drop"] = "pad", start: int = 0
) -> Indices:
    """Pick this rank's part of an epoch, as many samples on every rank.

    So no rank waits for a step that the others never take. Ranks take turns: batch k of all ranks together is the k-th
    batch that one process with the joined batch size sees.

    uneven: what to do when the ranks do not divide the samples: "pad" repeats the first few of the epoch, "drop" leaves
        out the last few.
    start: samples of `order` that all ranks together have used already.
    Returns (n,), n the same on every rank. Raises ValueError for another `uneven`, or if dropping would leave nothing.
    """
    _check(rank, size)
    check_uneven(uneven)
    left = max(len(order) - start, 0)
    if uneven == "drop" and start == 0 and 0 < left < size:
        raise ValueError(
            f"{left} samples are fewer than {size} ranks, so uneven='drop' would leave none; use uneven='pad'"
        )
    steps = left // size if uneven == "drop" else -(-left // size)
    turns = start + rank + size * np.arange(steps)
    return np.asarray(order[turns % max(len(order), 1)], dtype=np.int64)


def split_for_evaluation(order: NDArray[Any], *, rank: int, size: int) -> Indices:
    """Pick this rank's part of an evaluation: over all ranks every sample once, in rank order those of `order`.

    Ranks differ by at most one sample, and with more ranks than samples some have none: weight what you average over
    ranks by the number of samples.
    """
    _check(rank, size)
    return np.asarray(np.array_split(order, size)[rank], dtype=np.int64)


def check_uneven(uneven: str) -> None:
    """Raise ValueError for what is no way to split a number of samples that the ranks do not divide."""
    if uneven not in ("pad", "drop"):
        raise ValueError(f"uneven is {uneven!r}; it must be 'pad' or 'drop'")


def _check(rank: int, size: int) -> None:
    if size < 1:
        raise ValueError(f"size is {size}; it must be 1 or more")
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank}; it must be from 0 to {size - 1} (size is {size})")
