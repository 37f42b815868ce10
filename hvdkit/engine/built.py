"""Horovod's functions about its build, such as mpi_built(), for the libraries that hvdkit can use and uses.

hvdkit is not compiled, so "built" means: available when needed.
"""

from __future__ import annotations

from hvdkit.engine import runtime as engine
from hvdkit.transport.select import find_backend


def mpi_built() -> bool:
    """Can an MPI library be loaded? May be called before init(); does not start MPI."""
    return find_backend("mpi").can_load()


def mpi_enabled() -> bool:
    """Do the ranks communicate over MPI? False before init(), and for a single process without a launcher."""
    return _carrier("mpi_enabled()") == "mpi"


def mpi_threads_supported() -> bool:
    """May the script call MPI (with mpi4py, for example) while hvdkit runs? True if MPI runs with MPI_THREAD_MULTIPLE.

    False if MPI is not used. Raises NotInitializedError before init().
    """
    engine.runtime("mpi_threads_supported()")
    return mpi_enabled() and find_backend("mpi").takes_calls_from_threads()


def gloo_built() -> bool:
    """Is a torch with Gloo installed? May be called before init(); imports torch."""
    return find_backend("gloo").can_load()


def gloo_enabled() -> bool:
    """Do the ranks communicate over Gloo, as under torchrun? False before init()."""
    return _carrier("gloo_enabled()") == "gloo"


def _carrier(call: str) -> str:
    return engine.runtime(call).transport.backend if engine.is_initialized() else "none"


def nccl_built() -> int:
    """The version of NCCL that Horovod's core was built with, for example 22203 for 2.22.3, after init(); else 0.

    It is 0 on the native engine, even if this reduces GPU tensors by NCCL, which describe() shows. Scripts call this to
    multiply the learning rate of Adasum by local_size(), because Horovod with NCCL averages the ranks of a host first.
    hvdkit's Adasum does not.
    """
    return engine.runtime("nccl_built()").provider.nccl_version() if engine.is_initialized() else 0


def ddl_built() -> bool:
    """Is IBM's DDL used? Never in hvdkit."""
    return False


def ccl_built() -> bool:
    """Is Intel's oneCCL used? Never in hvdkit."""
    return False


def is_homogeneous() -> bool:
    """Do all hosts have the same number of ranks? Raises NotInitializedError before init()."""
    return bool(engine.runtime("is_homogeneous()").world.homogeneous)
