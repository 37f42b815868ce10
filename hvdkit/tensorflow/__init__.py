"""hvdkit for TensorFlow: `import hvdkit.tensorflow as hvd` in place of `import horovod.tensorflow as hvd`."""

from __future__ import annotations

from hvdkit.need import need

need("tensorflow", "tensorflow")
