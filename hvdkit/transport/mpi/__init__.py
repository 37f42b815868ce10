"""The transport over MPI (mpi4py)."""
