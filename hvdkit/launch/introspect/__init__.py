"""Report the state of a running job: stacks, metrics, and ranks that others wait for."""
