"""fit() on many ranks: all stop after the same batch, and callbacks that monitor a metric see the same value.

Keras reads model.stop_training at the end of each batch and of each epoch. If one rank stopped alone, the others would
wait in their next step. So the ranks agree right before: at the beginning and the end of each epoch, and after
each batch if a callback of any rank may stop training there. A stop from elsewhere takes effect at the end
of the epoch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from hvdkit.engine.basics import is_initialized
from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.engine.job_objects import allgather_object
from hvdkit.engine.named.submit import largest
from hvdkit.errors import RanksDisagreeError
from hvdkit.keras.backends import settle
from hvdkit.keras.callbacks.early_stopping import EarlyStopping
from hvdkit.keras.callbacks.epoch_end import EpochEnd
from hvdkit.keras.callbacks.metric_average import MetricAverageCallback
from hvdkit.keras.distributed import Distributed, sync_of
from hvdkit.keras.statistics import warn_of_statistics
from hvdkit.keras.sync import GradientSync
from hvdkit.log import logger
from hvdkit.strategies.backup_steps import BackupSteps
from hvdkit.strategies.periodic import PeriodicAverage

_NAME = "stop of fit()"
_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


class FitAgreement:
    """The agreements of the ranks in one call of fit().

    callbacks: the CallbackList's own list.
    process_set: the ranks that train together, more than one.
    every: number of batches between agreements, if a callback may stop training in a batch; 0: only at the ends of
    epochs.
    even: whether all ranks reduce gradients in each step, so that other numbers of steps are an error.
    """

    def __init__(
        self, callbacks: list[Any], model: keras.Model, process_set: ProcessSet, every: int, *, even: bool = False
    ) -> None:
        self._callbacks, self._model, self._process_set, self._every = callbacks, model, process_set, every
        self._group = process_set.group("fit()")
        self._size, self._rank = self._group.size, self._group.transport.rank
        self._epoch_end = EpochEnd(self._group.engine) if even else None
        self._epoch = self._batches = 0
        self._in_batches = False  # whether a callback of any rank may stop in a batch
        self._asked = False  # whether this rank wants to stop, and has not agreed with the others yet
        self._agreed = False
        self._warned = False
        _put_in_order(callbacks, first=self._rank == 0)
        if self._rank != 0:
            _silence(callbacks)

    def begin(self, steps: int | None, epochs: int | None) -> bool:
        """Return whether the ranks can agree at the ends of epochs, and have a reason to; collective.

        steps: of an epoch on this rank; None: unknown.
        epochs: the argument of fit(); None: unknown.
        Raises RanksDisagreeError if the numbers differ between ranks, as these would wait for each other at different
        points.
        """
        everyone = self._gather((steps, epochs, any(map(_agrees, self._callbacks))))
        counts = [count for count, _, _ in everyone]
        known = None not in counts
        if known:
            self._compare(
                counts,
                "fit() has different numbers of steps in an epoch on the ranks",
                "Give every rank the same number of steps, with hvd.shard() or steps_per_epoch.",
            )
        self._compare(
            [count for _, count, _ in everyone],
            "fit() has different arguments `epochs` on the ranks",
            "Call it with the same `epochs` on every rank.",
        )
        return known or any(agrees for _, _, agrees in everyone)

    def _compare(self, numbers: list[Any], what: str, cure: str) -> None:
        """Raise RanksDisagreeError if the ranks' numbers differ."""
        if len(set(numbers)) > 1:
            those = ", ".join(
                f"{number} on rank {rank}" for rank, number in zip(self._group.ranks, numbers, strict=True)
            )
            raise RanksDisagreeError(f"{what}: {those}. {cure}")

    def begin_epoch(self, epoch: int) -> None:
        """Agree on a stop that a callback requested before the first batch, and on when to agree; collective."""
        self._epoch, self._batches, self._agreed = epoch, 0, False
        may_stop = self._every > 0 and any(map(_may_stop_in_batch, self._callbacks))
        everyone = self._gather((bool(self._model.stop_training), may_stop, epoch))
        self._compare(
            [number for _, _, number in everyone],
            "fit() is in different epochs on the ranks, counted from 0",
            "Call it with the same `initial_epoch` on every rank.",
        )
        self._in_batches = any(may_stop for _, may_stop, _ in everyone)
        self._stop([rank for rank, (stop, _, _) in enumerate(everyone) if stop], "before")
        if self._epoch_end is not None:
            self._epoch_end.begin()

    def end_batch(self, batch: int) -> None:
        """Agree after a batch if that is due; collective then."""
        before, self._batches = self._batches, batch + 1
        if self._agreed:
            return
        stop = bool(self._model.stop_training)
        if self._in_batches and before // self._every != self._batches // self._every:
            settle()
            asked = largest(self._group, self._size - self._rank if stop or self._asked else 0, _NAME)
            self._stop([self._size - asked] if asked else [], f"after batch {batch} of")
        elif stop:
            self._asked, self._model.stop_training = True, False
            if not self._in_batches:
                logger.warning(
                    "model.stop_training was set within an epoch, and not by a callback after a batch. All ranks stop "
                    "at the end of this epoch. To stop earlier, set it in on_train_batch_end() of a callback."
                )

    def check_steps(self) -> None:
        """Raise RanksDisagreeError on all ranks if others have more batches in this epoch; collective."""
        if self._epoch_end is not None:
            settle()
            self._epoch_end.check(self._epoch + 1)

    def end_epoch(self, logs: Any) -> None:
        """Agree at the end of an epoch; collective. logs: as the first callback saw them."""
        everyone = self._gather((bool(self._model.stop_training) or self._asked, self._monitored(logs or {})))
        if not self._agreed:
            self._stop([rank for rank, (stop, _) in enumerate(everyone) if stop], "at the end of")
        if self._rank == 0 and not self._warned:
            self._warned = _warn_of_own_values([values for _, values in everyone])

    def _gather(self, told: Any) -> list[Any]:
        settle()
        return allgather_object(told, process_set=self._process_set)

    def _stop(self, asked: list[int], when: str) -> None:
        """Stop all ranks if any has requested it. when: precedes the number of the epoch in the log."""
        if not asked:
            return
        self._agreed, self._asked, self._model.stop_training = True, False, True
        if self._rank == 0 and asked[0] != 0:
            logger.warning(
                "Rank %s has set model.stop_training, so all ranks stop %s epoch %s.",
                self._group.ranks[asked[0]],
                when,
                self._epoch + 1,
            )

    def _monitored(self, logs: Any) -> dict[str, float]:
        """Return the values of this rank alone on which callbacks act, by callback and metric."""
        if any(isinstance(callback, MetricAverageCallback) for callback in self._callbacks):
            return {}
        return {
            f"{type(callback).__name__} monitors {callback.monitor}": float(logs[callback.monitor])
            for callback in self._callbacks
            if _monitors(callback)
            and not isinstance(callback, EarlyStopping)
            and np.ndim(logs.get(callback.monitor, ())) == 0
        }


def _may_stop_in_batch(callback: Any) -> bool:
    """Return whether it runs code in a batch that may set stop_training; hvdkit's and Keras's do not, except one."""
    return isinstance(callback, keras.callbacks.TerminateOnNaN) or _has_own(callback, _BATCH_HOOKS)


def _may_stop(callback: Any) -> bool:
    """Return whether it runs code of any hook that may set stop_training."""
    stops = isinstance(callback, (keras.callbacks.TerminateOnNaN, keras.callbacks.EarlyStopping))
    return stops or _has_own(callback, [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")])


def _agrees(callback: Any) -> bool:
    """Return whether the ranks must be at the end of an epoch together for it."""
    return isinstance(callback, MetricAverageCallback) or _may_stop(callback)


def _has_own(callback: Any, hooks: Iterable[str]) -> bool:
    """Return whether one of its hooks is neither Keras's nor hvdkit's."""
    modules = (getattr(getattr(callback, name), "__module__", None) or "" for name in hooks)
    return any(module.partition(".")[0] not in ("keras", "hvdkit") for module in modules)


def _monitors(callback: Any) -> bool:
    """Return whether it stops or changes the training, or chooses a checkpoint, by a metric."""
    kinds = keras.callbacks
    best = isinstance(callback, kinds.ModelCheckpoint) and callback.save_best_only
    return best or isinstance(callback, (kinds.EarlyStopping, kinds.ReduceLROnPlateau))


def _put_in_order(callbacks: list[Any], *, first: bool) -> None:
    """Move callbacks that monitor a metric behind the one that averages it. first: this is rank 0, which logs."""
    at = next((i for i, callback in enumerate(callbacks) if isinstance(callback, MetricAverageCallback)), 0)
    early = [callback for callback in callbacks[:at] if _monitors(callback)]
    if not early:
        return
    callbacks[: at + 1] = [*(callback for callback in callbacks[: at + 1] if callback not in early), *early]
    if first:
        logger.warning(
            "%s was given to fit() before MetricAverageCallback, where it would see the metrics of its own rank. "
            "hvdkit calls it after that. To avoid this warning, put MetricAverageCallback before it.",
            ", ".join(type(callback).__name__ for callback in early),
        )


def _silence(callbacks: list[Any]) -> None:
    for callback in callbacks:
        if _monitors(callback) or isinstance(callback, keras.callbacks.LearningRateScheduler):
            callback.verbose = 0


def _warn_of_own_values(everyone: list[dict[str, float]]) -> bool:
    """Warn if a callback acts on a metric that differs between ranks. everyone: each rank's monitored values."""
    for name in everyone[0]:
        values = [values[name] for values in everyone if name in values]
        if not np.array_equal(values, values[:1] * len(values), equal_nan=True):
            logger.warning(
                "%s, which is %.6g on rank 0 and between %.6g and %.6g on all ranks: each rank acts by its own value. "
                "Put hvd.callbacks.MetricAverageCallback() before it.",
                name,
                values[0],
                min(values),
                max(values),
            )
            return True
    return False


def _open(callbacks: Any) -> FitAgreement | None:
    """Make the agreement for a CallbackList; None if its ranks need none."""
    model = getattr(callbacks, "_model", None)
    sync = _find_sync(model)
    if sync is None and not any(isinstance(callback, MetricAverageCallback) for callback in callbacks.callbacks):
        return None
    process_set = global_process_set if sync is None else sync.process_set
    if not is_initialized() or not process_set.included() or process_set.size() == 1:
        return None
    if sync is None:  # the script's own train_step(), perhaps with hvdkit's tape; ranks may step differently
        return FitAgreement(callbacks.callbacks, model, process_set, 0)
    strategy = sync.strategy
    if process_set.group("fit()").transport.rank == 0:
        warn_of_statistics(model, sync)
    if strategy is not None and not strategy.lockstep:
        return None
    every = 0 if isinstance(strategy, BackupSteps) else 1
    if isinstance(strategy, PeriodicAverage):
        every = strategy.every
    agreement = FitAgreement(callbacks.callbacks, model, process_set, every, even=strategy is None)
    params = callbacks.params or {}
    return agreement if agreement.begin(params.get("steps"), params.get("epochs")) else None


def _find_sync(model: Any) -> GradientSync | None:
    """Return the GradientSync of the model's optimizer, which may be another attribute than `optimizer`."""
    for value in (getattr(model, "optimizer", None), *getattr(model, "__dict__", {}).values()):
        inner = getattr(value, "inner_optimizer", value) if isinstance(value, keras.optimizers.Optimizer) else None
        if isinstance(inner, Distributed):
            return sync_of(inner)
    return None


def install() -> None:
    """Have every CallbackList of Keras agree, right after its callbacks."""

    def begin(callbacks: Any, logs: Any = None) -> None:
        callbacks._hvdkit = _open(callbacks)
        if callbacks._hvdkit is not None and any(map(_may_stop_in_batch, callbacks.callbacks)):
            # Keras calls those with `async_safe` in another thread: stop_training would be read before they set it.
            callbacks._async_train = False

    def begin_epoch(agreement: FitAgreement, epoch: int, logs: Any = None) -> None:
        agreement.begin_epoch(epoch)

    def end_batch(agreement: FitAgreement, batch: int, logs: Any = None) -> None:
        agreement.end_batch(batch)

    def end_epoch(agreement: FitAgreement, epoch: int, logs: Any = None) -> None:
        agreement.end_epoch(logs)

    def check_steps(agreement: FitAgreement, epoch: int, logs: Any = None) -> None:
        agreement.check_steps()

    _call_before("on_epoch_end", _if_open(check_steps))  # callbacks may call collectives there
    _call_after("on_train_begin", begin)
    for name, act in (("on_epoch_begin", begin_epoch), ("on_train_batch_end", end_batch), ("on_epoch_end", end_epoch)):
        _call_after(name, _if_open(act))


def _if_open(act: Callable[..., None]) -> Callable[..., None]:
    def call(callbacks: Any, *args: Any, **kwargs: Any) -> None:
        if (agreement := getattr(callbacks, "_hvdkit", None)) is not None:
            act(agreement, *args, **kwargs)

    return call


def _call_after(name: str, act: Callable[..., None]) -> None:
    own = getattr(keras.callbacks.CallbackList, name)

    @functools.wraps(own)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        act(self, *args, **kwargs)

    setattr(keras.callbacks.CallbackList, name, call)


def _call_before(name: str, act: Callable[..., None]) -> None:
    own = getattr(keras.callbacks.CallbackList, name)

    @functools.wraps(own)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        act(self, *args, **kwargs)
        own(self, *args, **kwargs)

    setattr(keras.callbacks.CallbackList, name, call)
