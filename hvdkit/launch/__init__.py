"""hvdrun: from a command and some hosts to running ranks. Imports no framework and no MPI."""
