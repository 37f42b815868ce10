"""`hvdkit stacks`: what all ranks of a running job are doing."""
