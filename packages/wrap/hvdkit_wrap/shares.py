"""Plan which rows of a batch a rank takes and how its loss is weighted; pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Share:
    """A rank's rows of one batch.

    rows: indices into the dataset.
    whole: number of rows of the batch on all ranks together.
    split: do the ranks have different rows?
    mean_weight: factor of a mean over these rows that makes the average over the ranks the mean over the whole batch.
    sum_weight: the same for a sum.
    """

    rows: list[Any]
    whole: int
    split: bool
    mean_weight: float
    sum_weight: float


def bounds(count: int, *, rank: int, size: int) -> tuple[int, int]:
    """Return (first, end) of a rank's rows, of `count` rows in rank order; shares differ by at most one row."""
    return count * rank // size, count * (rank + 1) // size


def is_split(count: int, *, size: int, nominal: int | None) -> bool:
    """Is a batch of `count` rows split?

    No if a rank would have no row, and no if a rank would have a single row of a last batch that is smaller than the
    others, because batch normalization cannot train on one row. Every rank then computes the whole batch, with the
    same result. nominal: rows of a usual batch, None if that is not known.
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
    """Yield batches that each join `count` batches; the last batch may join fewer."""
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
    """Count the batches that join_batches yields."""
    return -(-batches // count)
