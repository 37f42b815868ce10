"""The recorder in each run of the script: it records steps, and gives one rank the batches of all ranks."""
