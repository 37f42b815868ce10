"""Horovod's C++ core as an engine of hvdkit, and the command that builds Horovod for current frameworks."""

__version__ = "0.1.0"
