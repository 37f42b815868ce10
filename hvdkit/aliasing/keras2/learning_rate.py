"""Make initial_lr optional, as before Horovod 0.20, whose callbacks took the learning rate from the optimizer."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from hvdkit.aliasing.said import warn_once


def apply(callbacks: ModuleType) -> None:
    """Patch the callbacks of hvdkit.keras.callbacks.learning_rate."""
    for name in ("LearningRateScheduleCallback", "LearningRateWarmupCallback"):
        _patch(getattr(callbacks, name), name)


def _patch(kind: Any, name: str) -> None:
    own, own_begin = kind.__init__, kind.on_train_begin

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        left_out = not args and kwargs.get("initial_lr") is None
        if left_out:
            warn_once(
                f"{name}() has no initial_lr, which Horovod requires since 0.20; hvdkit uses the learning rate of the "
                f"optimizer."
            )
            kwargs["initial_lr"] = 1.0
        own(self, *args, **kwargs)
        self._hvdkit_left_out = left_out or getattr(self, "_hvdkit_left_out", False)

    def on_train_begin(self: Any, logs: Any = None) -> None:
        if self.__dict__.pop("_hvdkit_left_out", False):
            self.initial_lr = float(self.model.optimizer.learning_rate)
        own_begin(self, logs)

    kind.__init__ = __init__
    if "on_train_begin" in vars(kind):
        kind.on_train_begin = on_train_begin
