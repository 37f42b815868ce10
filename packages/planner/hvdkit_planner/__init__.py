"""hvdkit plan: divides the training of a transformer over GPUs by computed memory and time."""

__version__ = "0.1.0"
