"""hvdkit plan: how to divide the training of a transformer over GPUs, by memory and time that are computed."""
