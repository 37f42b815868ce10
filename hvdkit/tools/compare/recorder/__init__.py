"""The recorder in each run of the script: it writes down steps, and gives one rank the batches of all ranks."""
