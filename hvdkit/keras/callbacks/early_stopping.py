"""An end of training on which all ranks agree."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvdkit.engine import runtime as engine
from hvdkit.engine.objects import allgather_object
from hvdkit.keras.backends import settle


class EarlyStopping(keras.callbacks.EarlyStopping):
    """Keras's own, with the same arguments; every rank sees the same value, so all of them stop after the same epoch.

    The value is the mean over ranks of what they monitor. After MetricAverageCallback that is the exact one already;
    without it, that of unequal shards is not weighted. A rank that another callback has told to stop stops all.
    """

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Agree on the monitored value, and on the end."""
        made = engine.runtime("EarlyStopping")
        settle()
        mine = (logs or {}).get(self.monitor)
        with made.lock:
            told = allgather_object(made.transport, (mine, bool(self.model.stop_training)))
        values = [value for value, _ in told if value is not None]
        seen = dict(logs or {})
        if values:
            seen[self.monitor] = float(np.mean(values))
        super().on_epoch_end(epoch, seen)
        if any(stopping for _, stopping in told):
            self.model.stop_training = True
