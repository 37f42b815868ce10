"""All ranks through MPI (mpi4py)."""
