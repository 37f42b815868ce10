"""Sharded optimizer state (ZeRO) for Keras: divided among the ranks."""
