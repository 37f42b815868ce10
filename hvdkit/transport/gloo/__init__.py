"""All ranks through Gloo, for worlds without MPI."""
