"""Sharded optimizer state (ZeRO) for torch: divided among the ranks."""
