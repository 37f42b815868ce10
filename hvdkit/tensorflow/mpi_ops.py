"""Collectives under Horovod's module name: `from horovod.tensorflow.mpi_ops import rank, size`."""

from hvdkit.alias import public_names_of
from hvdkit.engine import basics as _basics  # noqa: F401  (Horovod's scripts use hvd.mpi_ops._basics)

__getattr__ = public_names_of("hvdkit.tensorflow")
