"""A running job: agents' connections, the state of each rank, output, and how it ended."""
