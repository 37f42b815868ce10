"""Batches for ranks of unequal speed: faster ranks get more rows, and gradients are weighted by rows."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from hvdkit.balance.load_balancer import LoadBalancer
from hvdkit.balance.shares import Shares
from hvdkit.engine.gradient_hook import CollectiveCaller, Seconds
from hvdkit.keras.backends import settle
from hvdkit.keras.data import count_rows, take_rows
from hvdkit.keras.distributed import Distributed, sync_of
from hvdkit.keras.sharding.optimizer import ShardedOptimizer
from hvdkit.keras.sync import GradientSync
from hvdkit.training.sharding import Indices, plan_order
from hvdkit.transport.api import Transport

_WHO = "BalancedDataset"


class BalancedDataset(keras.utils.PyDataset):
    """Batches whose size over all ranks is fixed; faster ranks get more rows of them.

        data = hvd.BalancedDataset((x, y), 96, optimizer)
        model.compile(optimizer, "mse")
        model.fit(data, epochs=10)

    Each rank measures its computing time per row, without waits for other ranks. Every `every` steps the ranks exchange
    these times, and change the division of batches if that is predicted to shorten a step by at least 5 %.
    Gradients are multiplied by the rank's share of the batch times the number of ranks before they are averaged. So if
    the loss is a mean over the rank's rows, the average over ranks is the gradient of one process with the whole batch.
    The batches depend neither on speeds nor on the number of ranks, and are shuffled anew in each epoch, regardless of
    fit(shuffle=...).

    data: x, (x, y) or (x, y, sample_weight), each an array of numpy or of the backend, shape (n, ...), or a structure
    of such arrays.
    batch_size: rows of all ranks together, at least one per rank.
    optimizer: the result of DistributedOptimizer() with op=Average, without strategy, shard, gradient accumulation and
    local layers; one apply() per batch. It uses one BalancedDataset, the newest.
    shuffle: whether to shuffle the rows.
    seed: of the order, the same on all ranks.
    drop_last: leave out a smaller last batch. Otherwise a rank without rows of it gets one row, with weight 0.
    every: steps between two exchanges.
    speeds: of the ranks, relative to each other, if they are known before the first measurement.
    grain: each rank gets a multiple of this number of rows, and the fastest the rest; None: a 32nd of the batch on JAX,
    which compiles a program for each number of rows, and 1 on other backends.

    Raises TypeError or ValueError for invalid arguments. A step raises HorovodInternalError if the arguments differ
    between ranks.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        optimizer: Any,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        every: int = 10,
        speeds: Sequence[float] | None = None,
        grain: int | None = None,
    ) -> None:
        super().__init__()
        self._data = data if isinstance(data, tuple) else (data,)
        self._rows = count_rows(self._data, f"{_WHO}()", "arrays")
        self._batch_size, self._shuffle, self._seed, self._drop_last = batch_size, shuffle, seed, drop_last
        if not self._rows or (drop_last and self._rows < batch_size):
            raise ValueError(
                f"{_WHO}(): the data has {self._rows} rows, which is no batch of {batch_size}. Pass more rows, a "
                f"smaller batch_size, or drop_last=False."
            )
        #: Epoch of the next iteration over the data.
        self.epoch = 0
        #: TensorFlow requests batches in a thread of its own.
        self._lock = threading.RLock()
        self._fresh = True  # whether the next requested batch begins an iteration
        self._training = False  # whether an iteration is under way, between on_epoch_begin() and on_epoch_end()
        self._order: Indices | None = None  # rows of the iteration
        self._begun = self._steps = 0  # steps of the optimizer: at the iteration's beginning, and now
        self._given = self._trained = 0  # batches of the iteration: requested, and trained on
        self._parts: dict[int, tuple[int, int]] = {}  # step -> rows of its batch: this rank's, all
        #: For one process, which has no reductions to count: the optimizer, and its steps at the iteration's beginning.
        self._optimizer, self._applied = weakref.ref(optimizer), 0
        self._looped = False  # whether a loop of the script's own has requested all batches of the iteration
        self._before = 0, 0  # at the iteration's beginning: steps, and reductions of all optimizers of these ranks
        sync = _sync_of(optimizer)
        self._sync = weakref.ref(sync) if sync.process_set.included() else None
        transport = self._transport()
        if grain is None:
            on_jax = keras.backend.backend() == "jax"
            grain = max(1, min(batch_size // 32, batch_size // (transport.size if transport else 1))) if on_jax else 1
        if grain < 1:
            raise ValueError(f"{_WHO}(): grain is {grain}; it must be 1 or more.")
        self._shares = LoadBalancer(_WHO, batch_size, every, transport, speeds, grain)
        if self._sync is not None:
            sync.set_gradient_hook(self)

    def _transport(self) -> Transport | None:
        return None if self._sync is None else self._hooked_sync().group.transport

    def _hooked_sync(self) -> GradientSync:
        sync = None if self._sync is None else self._sync()
        if sync is None:
            raise ValueError(f"{_WHO}: its optimizer does not exist any more. Create one for the new optimizer.")
        return sync

    @property
    def plan(self) -> Shares:
        """Rows of each rank in the batches that are divided next."""
        return self._shares.plan

    def set_epoch(self, epoch: int) -> None:
        """Continue with the order of this epoch, on all ranks, as after fit(initial_epoch=epoch)."""
        with self._lock:
            self.epoch, self._given, self._trained = epoch, 0, 0
            self._order = None

    @property
    def workers(self) -> int:
        """Keras's attribute: 1, because a batch is divided by the speeds known at the end of the step before it."""
        return 1

    @workers.setter
    def workers(self, value: int) -> None:
        if value != 1:
            raise ValueError(f"{_WHO}: workers = {value} is not possible: batches are made one at a time.")

    @property
    def use_multiprocessing(self) -> bool:
        """Keras's attribute: False, because batches are made one at a time."""
        return False

    @use_multiprocessing.setter
    def use_multiprocessing(self, value: bool) -> None:
        if value:
            raise ValueError(f"{_WHO}: use_multiprocessing is not possible: batches are made one at a time.")

    def __len__(self) -> int:
        return self._rows // self._batch_size if self._drop_last else -(-self._rows // self._batch_size)

    @property
    def num_batches(self) -> int:
        """Return len(); Keras calls this before each iteration."""
        self._fresh = True
        return len(self)

    def __iter__(self) -> Iterator[Any]:
        self.on_epoch_begin()
        try:
            for index in range(self.num_batches):  # Keras 3.5 has no __iter__ of its own
                yield self[index]
            self._looped = keras.backend.backend() == "jax"
        finally:
            self.on_epoch_end()

    def on_epoch_begin(self) -> None:
        """Called by Keras at the beginning of an iteration."""
        with self._lock:
            self._count_applied()
            self._training, self._before = True, (self._steps, self._count_reductions())

    def _count_reductions(self) -> int:
        """Count the reductions of these ranks' optimizers; 0 in one process, which has none to weight."""
        sync = None if self._sync is None else self._sync()
        return 0 if sync is None else sync.group.engine.joining.rounds.total()

    def _count_applied(self) -> None:
        """Detect whether the optimizer of one process has stepped since the beginning of the previous iteration.

        It is called here and not later: during an epoch, Keras on JAX keeps the optimizer's variables elsewhere.
        """
        optimizer = self._optimizer()
        if self._shares.size == 1 and optimizer is not None:
            applied = int(optimizer.iterations)
            self._trained = max(0, applied - self._applied) if self._given else 0
            if self._looped:  # the script's own loop, whose steps on JAX change no variables
                self._trained, self._looped = self._given, False
            self._applied = applied

    def on_epoch_end(self) -> None:
        """Called by Keras at an iteration's end. Raises ValueError if another optimizer has trained on the batches."""
        settle()
        began, self._training = self._training, False  # Keras also calls this before an iteration
        steps, reductions = self._before
        if began and self._steps == steps and self._count_reductions() > reductions:
            raise ValueError(
                f"{_WHO}: in this epoch another optimizer than its own has reduced gradients, and its own has not. "
                "Gradients of its batches were not weighted by rows, if the other one trains on them. Pass the "
                "optimizer with which the model is compiled: create the dataset after compile(), with model.optimizer."
            )

    def __getitem__(self, index: int) -> Any:
        """Return this rank's rows of the next batch. index: ignored, as fit() shuffles it differently on each rank."""
        if self._fresh or self._order is None:
            settle()
        with self._lock:
            if self._fresh or self._order is None:
                self._begin()
            assert self._order is not None
            rows = self._order[self._given * self._batch_size :][: self._batch_size]
            if not len(rows):
                raise IndexError(f"{_WHO}: batch {self._given} was asked for, but an epoch has {len(self)}.")
            step = self._begun + self._given
            first, count = self._shares.part((0, step), len(rows))
            self._parts[step] = count, len(rows)
            self._given += 1
        return take_rows(self._data, rows[first : first + count] if count else rows[:1])

    def _begin(self) -> None:
        """Begin an iteration, while no step is under way."""
        transport = self._transport()
        if self._sync is not None and self._hooked_sync().gradient_hook is not self:
            raise ValueError(
                f"{_WHO}: a newer {_WHO} was created for the same optimizer, so the gradients of this one's batches "
                f"would not be weighted. Use one for each optimizer."
            )
        if not self._training:  # TensorFlow may request the first batch before on_epoch_begin()
            self._count_applied()
        if self._trained:
            self.epoch += 1
        if not self._shares.belongs_to(transport):  # ranks may have changed although their number has not
            self._shares.enter(transport)
            self._steps = 0
        self._fresh, self._given, self._trained, self._begun = False, 0, 0, self._steps
        self._parts.clear()
        self._shares.begin((0, self._begun))
        order = plan_order(self._rows, seed=self._seed if self._shuffle else None, epoch=self.epoch)
        self._order = order[: len(self) * self._batch_size]

    def begin_step(self) -> float:
        """See GradientHook.begin_step."""
        with self._lock:
            if not self._training:
                return 1.0
            if self._steps not in self._parts:
                raise ValueError(
                    f"{_WHO}: the optimizer takes step {self._trained + 1}, but {self._given} batches were asked for. "
                    f"Call its apply() once a batch, and end an iteration before it trains on other data."
                )
            rows, whole = self._parts[self._steps]
            return rows * self._shares.size / whole

    def reduced(self, caller: CollectiveCaller, seconds: Seconds | None) -> None:
        """See GradientHook.reduced."""
        with self._lock:
            rows, _ = self._parts.pop(self._steps, (0, 0)) if self._training else (0, 0)
            measured = rows if self._trained else 0  # the first step also includes the time since the last iteration
            self._trained += self._training
            self._steps += 1
            options = {
                "rows": self._rows,
                "batch_size": self._batch_size,
                "shuffle": self._shuffle,
                "seed": self._seed,
                "drop_last": self._drop_last,
                "epoch": self.epoch,
            }
            self._shares.stepped(caller, measured, seconds, self._position, [*options.items()])

    def _position(self) -> tuple[int, int]:
        return 0, max(self._steps, self._begun + self._given)


def _sync_of(optimizer: Any) -> GradientSync:
    """Return the optimizer's GradientSync. Raises TypeError or ValueError for one that takes no GradientHook."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not isinstance(inner, Distributed):
        raise TypeError(
            f"{_WHO}(): optimizer is a {type(optimizer).__name__} that is no hvd.DistributedOptimizer. Pass what "
            f"DistributedOptimizer() returned, which weights the gradients of these batches."
        )
    accumulates = inner.gradient_accumulation_steps  # type: ignore[attr-defined]
    if accumulates or isinstance(inner, ShardedOptimizer):
        what = f"gradient_accumulation_steps={accumulates}" if accumulates else "shard"
        raise ValueError(f"{_WHO}(): the optimizer has {what}, with which gradients cannot be weighted. Leave it out.")
    return sync_of(inner)
