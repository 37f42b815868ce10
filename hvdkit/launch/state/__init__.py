"""The state of a running job: the agents' connections, each rank, standard input, files, and how the job ended."""
