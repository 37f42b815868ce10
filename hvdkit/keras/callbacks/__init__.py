"""Callbacks for fit() on many ranks: `hvd.callbacks`."""

from __future__ import annotations

from hvdkit.keras.callbacks.early_stopping import EarlyStopping
from hvdkit.keras.callbacks.learning_rate import LearningRateScheduleCallback, LearningRateWarmupCallback
from hvdkit.keras.callbacks.metric_average import MetricAverageCallback
from hvdkit.keras.callbacks.rank_zero import BestModelCheckpoint, CSVLogger, ModelCheckpoint, TensorBoard, on_rank_zero
from hvdkit.keras.callbacks.start import BroadcastGlobalVariablesCallback
from hvdkit.keras.callbacks.track import TrackCallback

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "CSVLogger",
    "EarlyStopping",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "ModelCheckpoint",
    "TensorBoard",
    "TrackCallback",
    "on_rank_zero",
]
