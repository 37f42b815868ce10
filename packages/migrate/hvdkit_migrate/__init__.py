"""hvdkit migrate: read a training script, report what has to change for many ranks, and change it."""

__version__ = "0.1.0"
