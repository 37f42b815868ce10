"""The transport over Gloo, for worlds without MPI."""
