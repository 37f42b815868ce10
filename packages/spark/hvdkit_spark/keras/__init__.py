"""`KerasEstimator`: Keras models trained on a DataFrame, as in horovod.spark.keras."""

from __future__ import annotations

from hvdkit.optional_import import optional_import

for _package in ("keras", "pandas", "pyarrow", "fsspec"):
    optional_import(_package, "keras" if _package == "keras" else "")

from hvdkit_spark.keras.estimator import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
