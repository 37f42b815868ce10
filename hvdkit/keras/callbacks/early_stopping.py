"""An end of training on which all ranks agree."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvdkit.keras.state import allgather_object


class EarlyStopping(keras.callbacks.EarlyStopping):
    """Keras's own, with the same arguments; every rank sees the same value, so all of them stop after the same epoch.

    The value is the mean over ranks of what they monitor. After MetricAverageCallback that is the exact one already;
    without it, that of unequal shards is not weighted. A rank that another callback has told to stop stops all.
    """

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Agree on the monitored value, and on the end."""
        mine = (logs or {}).get(self.monitor)
        told = allgather_object((mine, bool(self.model.stop_training)))
        values = [value for value, _ in told if value is not None]
        seen = dict(logs or {})
        if values:
            seen[self.monitor] = float(np.mean(values))
        super().on_epoch_end(epoch, seen)
        if any(stopping for _, stopping in told):
            self.model.stop_training = True
