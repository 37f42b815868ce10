"""The batches of a rank: its share of the row groups, shuffled in each epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hvdkit.training.sharding import plan_order
from hvdkit_spark.common.dataset import Arrays, DataSet, read_group
from hvdkit_spark.common.store import Store


class Piece(NamedTuple):
    """A range of rows of a row group, from `start` to before `stop`."""

    group: int
    start: int
    stop: int


def plan_pieces(rows: Sequence[int], rank: int, size: int, *, evaluation: bool) -> list[Piece]:
    """Divide row groups among ranks; a group at a boundary is read by both of its ranks.

    rows: number of rows of each group.
    rank, size: this rank and the number of ranks.
    evaluation: if False, every rank gets the same number of rows; if size does not divide the number of rows, the last
        rank repeats the first rows of all. If True, no row is repeated, and ranks differ by at most one row.
    """
    total = sum(rows)
    if evaluation:
        return _cut(rows, total * rank // size, total * (rank + 1) // size)
    share = -(-total // size)
    pieces: list[Piece] = []
    start, left = rank * share % total, share
    while left:
        stop = min(start + left, total)
        pieces += _cut(rows, start, stop)
        start, left = 0, left - (stop - start)
    return pieces


def _cut(rows: Sequence[int], start: int, stop: int) -> list[Piece]:
    """Cut the rows from `start` to before `stop`, counted over all groups, into ranges within groups."""
    pieces, before = [], 0
    for group, count in enumerate(rows):
        first, last = max(start - before, 0), min(stop - before, count)
        if first < last:
            pieces.append(Piece(group, first, last))
        before += count
    return pieces


class Batches:
    """The batches of this rank.

    store, data: the Parquet files and their row groups.
    batch_size: rows of a batch.
    rank, size: this rank and the number of ranks.
    evaluation: if True, no row is repeated to give all ranks the same number.
    seed: seed of the order of rows, which changes with the epoch; None leaves the order as it is.
    buffer_rows: number of rows that are read before they are shuffled.
    cache: keep in memory what was read?
    """

    def __init__(
        self,
        store: Store,
        data: DataSet,
        batch_size: int,
        *,
        rank: int,
        size: int,
        evaluation: bool = False,
        seed: int | None = None,
        buffer_rows: int = 1,
        cache: bool = False,
    ) -> None:
        self._store, self._data, self._batch_size = store, data, batch_size
        self._pieces = plan_pieces([group.rows for group in data.groups], rank, size, evaluation=evaluation)
        self.rows = sum(piece.stop - piece.start for piece in self._pieces)
        self._seed = None if seed is None else seed + rank  # ranks have different rows anyway
        self._buffer_rows = buffer_rows
        self._cache: dict[Piece, Arrays] | None = {} if cache else None

    def __len__(self) -> int:
        """Return the number of batches in an epoch; the last batch may be smaller."""
        return -(-self.rows // self._batch_size)

    def epoch(self, number: int, steps: int | None = None) -> Iterator[Arrays]:
        """Iterate over the batches of an epoch, by column.

        steps: number of batches, None for one pass; after the last row the first rows are repeated.
        """
        left, again = len(self) if steps is None else steps, 0
        while left > 0:
            for batch in self._once(number, again):
                yield batch
                left -= 1
                if left == 0:
                    return
            again += 1

    def _once(self, epoch: int, again: int) -> Iterator[Arrays]:
        seed = None if self._seed is None else self._seed + 1_000_003 * again
        waiting: list[Arrays] = []
        order = plan_order(len(self._pieces), seed=seed, epoch=epoch)
        for at, index in enumerate(order):
            waiting.append(self._read(self._pieces[index]))
            last = at == len(order) - 1
            if not last and sum(map(_count, waiting)) < max(self._buffer_rows, self._batch_size):
                continue
            rows = _join(waiting)
            if seed is not None:
                mixed = plan_order(_count(rows), seed=seed + at, epoch=epoch)
                rows = {name: array[mixed] for name, array in rows.items()}
            count = _count(rows)
            whole = count if last else count - count % self._batch_size
            for start in range(0, whole, self._batch_size):
                yield {name: array[start : min(start + self._batch_size, whole)] for name, array in rows.items()}
            waiting = [{name: array[whole:] for name, array in rows.items()}] if whole < count else []

    def _read(self, piece: Piece) -> Arrays:
        if self._cache is not None and piece in self._cache:
            return self._cache[piece]
        group = self._data.groups[piece.group]
        arrays = read_group(self._store, group, self._data.widths, piece.start, piece.stop)
        if self._cache is not None:
            self._cache[piece] = arrays
        return arrays


def _count(arrays: Arrays) -> int:
    return len(next(iter(arrays.values())))


def _join(parts: Sequence[Arrays]) -> Arrays:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
