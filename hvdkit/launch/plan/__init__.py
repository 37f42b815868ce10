"""The plan of a job before anything starts: hosts, ranks, MPI, launcher, network, environment. Data only."""
