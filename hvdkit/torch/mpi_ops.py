"""Where Horovod's scripts import collectives from: `from horovod.torch.mpi_ops import allreduce_async_, poll`."""

from hvdkit.alias import public_names_of
from hvdkit.engine import basics as _basics  # noqa: F401  (hvd.mpi_ops._basics is known to Horovod's scripts)

__getattr__ = public_names_of("hvdkit.torch")
