"""Run a job: start its processes, write their output, start it again after a loss."""
