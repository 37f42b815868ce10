"""hvdkit migrate: reads a training script, reports the changes that it needs for many ranks, and makes them."""

__version__ = "0.1.0"
