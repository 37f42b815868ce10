"""Callbacks that write files on rank 0 only, without `if hvd.rank() == 0` around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from hvdkit.engine import runtime as engine


def _first() -> bool:
    return engine.runtime("fit()").world.rank == 0


class _RankZero:
    """Mixin before a callback: on ranks other than 0 Keras calls only its set_params and set_model."""


def _hook(name: str) -> Callable[..., Any]:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(_RankZero, self), name)(*args, **kwargs) if _first() else None

    hook.__name__ = name
    return hook


for _name in dir(keras.callbacks.Callback):
    if _name.startswith("on_"):
        setattr(_RankZero, _name, _hook(_name))


def on_rank_zero(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    """Return the callback on rank 0, and a callback that does nothing on the other ranks.

    Do not use it for callbacks that stop or change the training; these must run on all ranks.
    """
    return callback if _first() else keras.callbacks.Callback()


class ModelCheckpoint(_RankZero, keras.callbacks.ModelCheckpoint):
    """Keras's callback, with the same arguments; it writes on rank 0 only."""


class BestModelCheckpoint(_RankZero, keras.callbacks.ModelCheckpoint):
    """Save the model when the monitored value is the best so far, on rank 0 only.

    filepath: ends in .keras, or in .weights.h5 with save_weights_only. As in Horovod it may be assigned later, but
    before fit() (else ValueError). The other arguments: as for keras.callbacks.ModelCheckpoint.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | None = None,
    ) -> None:
        ending = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath or f"unset{ending}",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = filepath

    def on_train_begin(self, logs: Any = None) -> None:
        """Raise ValueError on every rank if no filepath is set."""
        if self.filepath is None:
            raise ValueError(
                "BestModelCheckpoint: filepath is not set. Pass it to BestModelCheckpoint(), or assign it before fit()."
            )
        super().on_train_begin(logs)


class TensorBoard(_RankZero, keras.callbacks.TensorBoard):
    """Keras's callback, with the same arguments; it writes on rank 0 only."""

    def set_model(self, model: keras.Model) -> None:
        """Call Keras's method, which creates the folders."""
        if _first():
            super().set_model(model)
        else:
            keras.callbacks.Callback.set_model(self, model)


class CSVLogger(_RankZero, keras.callbacks.CSVLogger):
    """Keras's callback, with the same arguments; it writes on rank 0 only."""
