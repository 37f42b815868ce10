"""Which Horovod is built."""

#: The last release, and the one that the mends are for.
HOROVOD = "0.28.1"

#: Of its source archive on PyPI, horovod-0.28.1.tar.gz.
SOURCE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
