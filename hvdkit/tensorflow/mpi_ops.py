"""Where Horovod's scripts import collectives from: `from horovod.tensorflow.mpi_ops import rank, size`."""

from hvdkit.alias import public_names_of
from hvdkit.engine import basics as _basics  # noqa: F401  (hvd.mpi_ops._basics is known to Horovod's scripts)

__getattr__ = public_names_of("hvdkit.tensorflow")
