"""Ranks with a GPU each: NCCL, called through ctypes, on the framework's own device memory."""
