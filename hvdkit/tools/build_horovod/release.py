"""Which Horovod is built."""

#: The last release, and the one that the mends are for.
HOROVOD = "0.28.1"
