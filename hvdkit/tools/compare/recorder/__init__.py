"""What is put into each run of the script: it writes down steps, and hands one rank the batches of all."""
