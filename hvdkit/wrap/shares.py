"""Which rows of a batch a rank takes, and what they weigh: pure planning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Share:
    """A rank's part of one batch.

    rows: indices into the dataset. whole: rows of the batch on all ranks together. split: do the ranks have
    different rows? mean_weight: what a mean over these rows is multiplied with, so that the average over ranks is the
    mean over the whole batch. sum_weight: the same for a sum.
    """

    rows: list[Any]
    whole: int
    split: bool
    mean_weight: float
    sum_weight: float


def bounds(count: int, *, rank: int, size: int) -> tuple[int, int]:
    """First row and the one after the last of a rank, of `count`: in rank order, differing by at most one."""
    return count * rank // size, count * (rank + 1) // size


def is_split(count: int, *, size: int, nominal: int | None) -> bool:
    """Is a batch of `count` rows split?

    Not if a rank would have no row; and not if one would have a single row of a last batch that is smaller than the
    others, as batch normalization cannot train on that. Every rank then computes all of it, which comes to the same.
    nominal: rows of a usual batch, None if that is not known.
    """
    if count < size:
        return False
    return count >= 2 * size or nominal is None or count >= nominal


def plan_share(batch: Iterable[Any], *, rank: int, size: int, nominal: int | None = None) -> Share:
    """Take a rank's rows of a batch; see is_split. batch: the indices of all its rows."""
    rows = list(batch)
    if not is_split(len(rows), size=size, nominal=nominal):
        return Share(rows, len(rows), False, 1.0, 1.0)
    first, after = bounds(len(rows), rank=rank, size=size)
    return Share(rows[first:after], len(rows), True, size * (after - first) / len(rows), float(size))


def join_batches(batches: Iterable[Sequence[Any]], count: int) -> Iterator[list[Any]]:
    """Batches `count` times as large; the last one may be smaller."""
    joined: list[Any] = []
    parts = 0
    for batch in batches:
        joined += list(batch)
        parts += 1
        if parts == count:
            yield joined
            joined, parts = [], 0
    if parts:
        yield joined


def joined_length(batches: int, count: int) -> int:
    """How many batches join_batches makes."""
    return -(-batches // count)
