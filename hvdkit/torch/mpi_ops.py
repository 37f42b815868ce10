"""Collectives under Horovod's module name: `from horovod.torch.mpi_ops import allreduce_async_, poll`."""

from hvdkit.alias import public_names_of
from hvdkit.engine import basics as _basics  # noqa: F401  (Horovod's scripts use hvd.mpi_ops._basics)

__getattr__ = public_names_of("hvdkit.torch")
