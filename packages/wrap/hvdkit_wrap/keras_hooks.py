"""Patch Keras right after the script has imported it."""

from __future__ import annotations

from typing import Any

import keras

import hvdkit.keras as hvd
from hvdkit.keras import DistributedOptimizer, init
from hvdkit_wrap import keras_files, keras_fit
from hvdkit_wrap.places import called_from_hvdkit
from hvdkit_wrap.refusal import refuse
from hvdkit_wrap.session import active, current


def install() -> None:
    """Patch compile(), fit() and the functions that read and write files."""
    compiling, fitting = keras.Model.compile, keras.Model.fit

    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        compiling(self, *args, **kwargs)
        if active():
            wrap_optimizer(self)

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not active() or keras_fit.fitting():
            return fitting(self, *args, **kwargs)
        wrap_optimizer(self)
        return keras_fit.fit(fitting, self, *args, **kwargs)

    keras.Model.compile, keras.Model.fit = compile, fit
    keras_files.watch()
    _refuse_hvdkit()


def join() -> None:
    """Call init(), unless this rank has done so."""
    if not hvd.is_initialized():
        init()
        current().size = hvd.size()


def wrap_optimizer(model: Any) -> None:
    """Wrap the optimizer of a compiled model once, and scale its learning rate if the settings request that."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or "_hvdkit" in optimizer.__dict__:
        return
    join()
    factor = current().rate_factor
    if factor != 1.0:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if isinstance(getattr(inner, "_learning_rate", None), keras.optimizers.schedules.LearningRateSchedule):
            raise refuse(
                "the optimizer's learning rate is a schedule, which --wrap-batch multiply cannot scale",
                "Add --wrap-rate keep and scale the schedule in the script, or remove --wrap-batch.",
            )
        optimizer.learning_rate = float(optimizer.learning_rate) * factor
    DistributedOptimizer(optimizer)


def _refuse_hvdkit() -> None:
    plain = hvd.init

    def refusing(*args: Any, **kwargs: Any) -> Any:
        if active() and not called_from_hvdkit():
            raise refuse(
                "the script calls hvd.init(), so it already uses hvdkit", "Start it with hvdrun without --wrap."
            )
        return plain(*args, **kwargs)

    hvd.init = refusing
