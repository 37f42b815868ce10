"""Batches for ranks of unequal speed: faster ranks get more rows, and gradients are weighted by rows."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler, dataloader

from hvdkit.balance.load_balancer import LoadBalancer
from hvdkit.balance.shares import Shares
from hvdkit.engine.allreduce import AllReduce
from hvdkit.engine.sharding.strategy import ZeroStrategy
from hvdkit.torch.data.compute_clock import ComputeClock
from hvdkit.torch.data.repeated_order import warn_of_repeated_order
from hvdkit.torch.data.sharded import SamplerState
from hvdkit.torch.picklable_as_plain import is_wrapped
from hvdkit.torch.sync import GradientSync
from hvdkit.training.sharding import Indices, plan_order
from hvdkit.transport.api import Transport


class BalancedSampler(Sampler[list[int]]):
    """Sample batches whose size over all ranks is fixed; faster ranks get more rows of them.

        sampler = hvd.data.BalancedSampler(dataset, 96, optimizer)
        loader = DataLoader(dataset, batch_sampler=sampler)

    Each rank measures its computing time per row, without waits for other ranks. Every `every` steps the ranks exchange
    these times, and change the division of batches if that is predicted to shorten a step by at least 5 %. During
    backward() gradients are multiplied by the rank's share of the batch times the number of ranks. So if the loss is a
    mean over the rank's rows, the average over ranks is the gradient of one process with the whole batch. The batches
    depend neither on speeds nor on the number of ranks.

    dataset: with a length.
    batch_size: rows of all ranks together, at least one per rank.
    optimizer: the DistributedOptimizer that trains on these batches, with op=Average or Sum; on all its ranks alike. It
    uses one BalancedSampler, the newest.
    others: further optimizers that train on these batches.
    shuffle: whether to shuffle the rows; call `set_epoch` then.
    seed: of the order, as for ShardedSampler; the same on all ranks.
    drop_last: leave out a smaller last batch. Otherwise a rank without rows of it gets one row, with weight 0.
    every: steps between two exchanges.
    speeds: of the ranks, relative to each other, if they are known before the first measurement.

    Raises TypeError or ValueError for invalid arguments. A step raises HorovodInternalError if the arguments differ
    between ranks.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        optimizer: torch.optim.Optimizer,
        *,
        others: Sequence[torch.optim.Optimizer] = (),
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        every: int = 10,
        speeds: Sequence[float] | None = None,
    ) -> None:
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self.drop_last, self.epoch = drop_last, 0
        self._start = 0  # rows used when this epoch began or was resumed
        self._used = 0  # rows used up to the last step
        self._finished = False
        #: A loader's thread may request a batch while the ranks agree on a plan.
        self.lock = threading.Lock()
        self._iterations = 0
        self._batches: _Batches | None = None  # the newest iteration of which a batch was requested
        self._current = 0, 0  # rows of the batch in training: of this rank, of all ranks; none outside a loop
        self._rows, self._end = 0, 0  # rows of this rank since the last step; rows of the epoch up to this batch
        # Weakly, so that an optimizer that the script deletes ends at the same point on all ranks.
        syncs = [_sync_of(one) for one in (optimizer, *others)]
        self._sync = None if syncs[0] is None else weakref.ref(syncs[0])
        self._clock = None if self._sync is None else ComputeClock(self._first_sync().strategy)
        self._shares = LoadBalancer("BalancedSampler", batch_size, every, self._transport(), speeds)
        for sync in syncs:
            if sync is not None:
                sync.set_gradient_hook(self)
        _watch_loaders()

    def _first_sync(self) -> GradientSync:
        sync = None if self._sync is None else self._sync()
        if sync is None:
            raise ValueError(
                "BalancedSampler: its optimizer does not exist any more. Create one for the new optimizer."
            )
        return sync

    def _transport(self) -> Transport | None:
        return None if self._sync is None else self._first_sync().group.transport

    @property
    def rank(self) -> int:
        """This rank, among the optimizer's ranks."""
        return self._shares.rank

    @property
    def size(self) -> int:
        """The number of the optimizer's ranks."""
        return self._shares.size

    @property
    def plan(self) -> Shares:
        """Rows of each rank in the batches that are divided next."""
        return self._shares.plan

    @property
    def weight(self) -> float:
        """The factor of this rank's gradients in the present batch."""
        rows, whole = self._current
        return rows * self.size / whole if whole else 1.0

    def __iter__(self) -> Iterator[list[int]]:
        if self._sync is not None and self._first_sync().gradient_hook is not self:
            raise ValueError(
                "BalancedSampler: a newer BalancedSampler was created for the same optimizer, so the gradients of this "
                "one's batches would not be weighted. Use one sampler for each optimizer."
            )
        return _Batches(self)

    def __len__(self) -> int:
        """Return the number of batches of the next iteration."""
        rows = len(self.dataset) - (0 if self._finished else self._start)
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle for this epoch; call it on every rank before the epoch begins.

        A resumed epoch continues at the batch where it was saved; any other begins at its first one.
        """
        if epoch != self.epoch or self._finished:
            self._start = self._used = 0
            self._finished = False
        self.epoch = epoch

    def state_dict(self) -> SamplerState:
        """Return the progress at the last step; the same on every rank. A complete epoch has no rows left."""
        return {"epoch": self.epoch, "used": self._used, "seed": self.seed}

    def load_state_dict(self, state: SamplerState) -> None:
        """Resume where `state` was saved, also with another number of ranks, whose speeds are measured anew."""
        self.epoch, self.seed = state["epoch"], state["seed"]
        self._start = self._used = state["used"]
        self._finished = False

    def begin_iteration(self, batches: _Batches) -> tuple[int, int, Indices]:
        """Begin an iteration with its first batch; returns its number, the rows used before, the remaining order."""
        transport = self._transport()
        if not self._shares.belongs_to(transport):  # ranks may have changed although their number has not
            self._shares.enter(transport)
            self._iterations = 0
        if self._finished:
            if self._used and self.shuffle:
                warn_of_repeated_order("BalancedSampler", first=self.rank == 0)
            self._start = 0
        self._finished, self._used = False, self._start
        self._iterations += 1
        self._shares.begin((self._iterations, 0))
        self._batches = batches
        order = plan_order(len(self.dataset), seed=self.seed if self.shuffle else None, epoch=self.epoch)[self._start :]
        whole = len(self) * self.batch_size
        return self._iterations, self._start, order[:whole]

    def part(self, iteration: int, batch: int, rows: int) -> tuple[int, int]:
        """Return (first row, number of rows) of this rank in a batch of `rows` rows."""
        return self._shares.part((iteration, batch), rows)

    def begin_batch(self, number: int, rows: int, whole: int, end: int) -> None:
        """Begin training with a batch.

        number: of the batch in the iteration.
        rows: of this rank.
        whole: of all ranks.
        end: rows of the epoch up to this batch.
        """
        self._current, self._end = (rows, whole), end
        self._rows += rows
        if number == 0:
            self._rows = rows
            if self._clock is not None:
                self._clock.restart()

    def end_iteration(self) -> None:
        """Record that no batch is in training."""
        self._current, self._finished = (0, 0), True

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor that replaces a gradient from backward; None to keep it."""
        if self._clock is not None:
            self._clock.gradient(gradient)
        return weighted(gradient, self.weight)

    def stepped(self, sync: GradientSync) -> None:
        """Count a step of the optimizer; collective every `every` steps."""
        if self._sync is None or self._clock is None or sync is not self._sync():
            return
        self._used = self._end
        rows, self._rows = self._rows, 0
        options = {
            "rows": len(self.dataset),
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "epoch": self.epoch,
        }
        with self.lock:
            self._shares.stepped(sync, rows, self._clock.step(), self._position, [*options.items()])

    def _position(self) -> tuple[int, int]:
        return (0, 0) if self._batches is None else (self._batches.number, self._batches.given)


class _Batches:
    """One iteration over a BalancedSampler, which may be ahead of training."""

    def __init__(self, sampler: BalancedSampler) -> None:
        self._sampler = sampler
        self.number, self.given = -1, 0
        self._order: Indices = np.empty(0, np.int64)
        self._used = 0
        self._parts: list[tuple[int, int, int]] = []  # of each batch: own rows, all rows, the epoch's rows so far
        self._begun: int | None = None  # number of batches that a DataLoader has yielded; None without one

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> list[int]:
        sampler = self._sampler
        with sampler.lock:
            if self.number < 0:
                self.number, self._used, self._order = sampler.begin_iteration(self)
            rows = self._order[self.given * sampler.batch_size :][: sampler.batch_size]
            if not len(rows):
                if self._begun is None:
                    sampler.end_iteration()
                raise StopIteration
            first, count = sampler.part(self.number, self.given, len(rows))
            end = self._used + self.given * sampler.batch_size + len(rows)
            self._parts.append((count, len(rows), end))
            self.given += 1
            if self._begun is None:
                sampler.begin_batch(self.given - 1, *self._parts[-1])
            return [int(row) for row in (rows[first : first + count] if count else rows[:1])]

    def begin(self) -> None:
        """Record that a DataLoader yields its next batch."""
        self._begun = 0 if self._begun is None else self._begun
        self._sampler.begin_batch(self._begun, *self._parts[self._begun])
        self._begun += 1

    def end(self) -> None:
        """Record that a DataLoader has yielded all batches."""
        self._sampler.end_iteration()


@functools.cache
def _watch_loaders() -> None:
    """Patch DataLoaders to report the yielded batch: with workers they request batches from the sampler ahead."""
    plain = dataloader._BaseDataLoaderIter.__next__

    @functools.wraps(plain)
    def __next__(self: Any) -> Any:
        if isinstance(getattr(self._index_sampler, "sampler", None), BalancedSampler):
            raise ValueError(
                "BalancedSampler: it was passed to DataLoader or BatchSampler as sampler=, which samples single rows. "
                "It samples whole batches, whose gradients it weights. Use DataLoader(dataset, batch_sampler=sampler)."
            )
        try:
            batch = plain(self)
        except StopIteration:
            if isinstance(self._sampler_iter, _Batches):
                self._sampler_iter.end()
            raise
        if isinstance(self._sampler_iter, _Batches):
            self._sampler_iter.begin()
        return batch

    dataloader._BaseDataLoaderIter.__next__ = __next__  # type: ignore[method-assign]


def weighted(gradient: torch.Tensor, weight: float) -> torch.Tensor | None:
    """Return the gradient times a weight; None to keep the gradient."""
    if weight == 0.0:  # also for an infinite gradient
        return torch.zeros_like(gradient)
    return None if weight == 1.0 else gradient * weight


def _sync_of(optimizer: Any) -> GradientSync | None:
    """Return the GradientSync of an optimizer; None for one that trains alone. Raises TypeError or ValueError."""
    if not isinstance(optimizer, torch.optim.Optimizer) or not is_wrapped(optimizer):
        raise TypeError(
            f"BalancedSampler(): optimizer is a {type(optimizer).__name__} that is no hvd.DistributedOptimizer. Pass "
            f"what DistributedOptimizer() returned, which weights the gradients of this sampler's batches."
        )
    sync: GradientSync | None = optimizer._hvdkit  # type: ignore[attr-defined]
    if sync is not None and not isinstance(sync.strategy, (AllReduce, ZeroStrategy)):
        raise ValueError(
            f"BalancedSampler(): the optimizer has the strategy {type(sync.strategy).__name__}, which does not average "
            f"the gradients of each step, so rows cannot be weighted. Use op=hvd.Average without a strategy."
        )
    return sync
