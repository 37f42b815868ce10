"""Ranks of one host: shared memory."""
