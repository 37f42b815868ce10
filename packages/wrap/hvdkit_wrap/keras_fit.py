"""Run fit() on all ranks: split its data and add the callbacks of distributed training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

import hvdkit.keras as hvd
from hvdkit_wrap import keras_data
from hvdkit_wrap.places import user_callsite
from hvdkit_wrap.refusal import refuse
from hvdkit_wrap.session import current

_depth = 0


def fitting() -> bool:
    """Is fit() running? A call may then come from a callback that runs on some ranks only."""
    return _depth > 0


def fit(plain: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call Keras's own fit() with this rank's rows."""
    given = inspect.signature(plain).bind(model, *args, **kwargs).arguments
    del given["self"]
    session, line = current(), user_callsite()
    _check_loss(model)
    with keras_data.split(model, given) as (told, rows):
        given["callbacks"] = _callbacks(model, given.get("callbacks"))
        say = session.report.say
        if not session.report.shown:
            say("ranks", hvd.describe())
            say("optimizer", f"{type(model.optimizer).__name__}: steps on the gradients of all ranks")
            say("data", f"fit() at {line}: {told}; every rank does validation, evaluate() and predict() on all data")
            say("batch", rows)
            say("learning rate", _rates())
            say("state", "weights and optimizer state of rank 0, broadcast to all ranks before the first step")
            say("metrics", "those of fit() are averaged over all ranks at the end of every epoch")
            say("output", "only rank 0 prints, shows progress and saves models; every rank writes files from open()")
            session.report.show(here=session.shows_table)
        _vary_dropout(model, session.rank)
        with _under_way():
            result = plain(model, **given)
        hvd.broadcast_model(model)  # statistics of batch normalization differ between ranks
    return result


@contextmanager
def _under_way() -> Iterator[None]:
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def _rates() -> str:
    session = current()
    if not session.multiplies:
        return "the script's, as all ranks together train on its batches"
    warmup = f", after a warm-up of {session.settings.warmup:g} epochs" if session.settings.warmup else ""
    return f"the script's times {session.rate_factor:.4g} ({session.settings.rate}){warmup}"


def _check_loss(model: Any) -> None:
    if any(getattr(one, "reduction", "") == "sum" for one in keras.tree.flatten(getattr(model, "loss", None))):
        raise refuse(
            "the loss is a sum over the rows of a batch (reduction='sum'), but gradients are averaged over the ranks",
            "Use the mean, reduction='sum_over_batch_size', and adapt the learning rate.",
        )


def _callbacks(model: Any, given: Any) -> list[Any]:
    own = list(given) if isinstance(given, (list, tuple)) else getattr(given, "callbacks", [given] if given else [])
    kinds = keras.callbacks
    writers = (kinds.ModelCheckpoint, kinds.TensorBoard, kinds.CSVLogger, kinds.RemoteMonitor)
    for one in own:
        if isinstance(one, kinds.BackupAndRestore):
            raise refuse("BackupAndRestore restores the epoch on rank 0 only", "Use ModelCheckpoint and load_model().")
    session = current()
    mine = [hvd.callbacks.on_rank_zero(one) if isinstance(one, writers) else one for one in own]
    made = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    if session.rate_factor != 1.0:
        for one in mine:
            if isinstance(one, kinds.LearningRateScheduler) and not hasattr(one, "_hvdkit_factor"):
                one.schedule, one._hvdkit_factor = _scaled(one.schedule, session.rate_factor), session.rate_factor
        if session.settings.warmup and not model.optimizer.__dict__.get("_hvdkit_warm"):  # in its first fit()
            model.optimizer.__dict__["_hvdkit_warm"] = True
            rate = float(model.optimizer.learning_rate)
            epochs: Any = session.settings.warmup
            made.append(hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=epochs))
    return [*made, *mine]


def _scaled(schedule: Callable[..., float], factor: float) -> Callable[..., float]:
    def scaled(epoch: int, rate: float) -> float:
        try:
            return schedule(epoch, rate / factor) * factor
        except TypeError:  # a schedule with one argument, which Keras accepts too
            return schedule(epoch) * factor

    return scaled


def _vary_dropout(model: Any, rank: int) -> None:
    """Give each rank other dropout masks, by changing the seeds of a model once."""
    if rank == 0 or getattr(model, "_hvdkit_varied", False) or not model.built:
        return
    model._hvdkit_varied = True
    for variable in model.non_trainable_variables:
        if "seed_generator_state" in variable.path:
            variable.assign(variable + rank)
