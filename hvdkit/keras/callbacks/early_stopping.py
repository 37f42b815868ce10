"""EarlyStopping that ends training on all ranks after the same epoch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvdkit.keras.state import allgather_object


class EarlyStopping(keras.callbacks.EarlyStopping):
    """Keras's callback, with the same arguments; all ranks see the same value, so they stop after the same epoch.

    The value is the mean of the ranks' monitored values. After MetricAverageCallback each of these is already exact;
    without it, unequal shards are not weighted. If another callback stops one rank, all ranks stop.
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
