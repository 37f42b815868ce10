"""NCCL for ranks with a GPU each, called through ctypes, on the framework's own device memory."""
