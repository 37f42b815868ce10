"""Moves buffers inside a fixed group of ranks. select.py chooses the transport."""
