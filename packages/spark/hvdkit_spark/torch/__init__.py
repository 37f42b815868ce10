"""`TorchEstimator`: PyTorch models trained on a DataFrame, as in horovod.spark.torch."""

from __future__ import annotations

from hvdkit.optional_import import optional_import

for _package in ("torch", "pandas", "pyarrow", "fsspec"):
    optional_import(_package, "torch" if _package == "torch" else "")

from hvdkit_spark.torch.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
