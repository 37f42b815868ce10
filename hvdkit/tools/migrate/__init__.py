"""hvdkit migrate: read a training script, say what has to change for many ranks, and change it."""
