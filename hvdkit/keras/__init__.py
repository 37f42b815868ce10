"""hvdkit for Keras 3, on TensorFlow, PyTorch or JAX: `import hvdkit.keras as hvd`."""

from __future__ import annotations

from hvdkit.need import need

need("keras", "keras")

from hvdkit.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from hvdkit.torch.basics import init, rank, size, shutdown
