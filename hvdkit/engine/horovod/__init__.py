"""Horovod's own C++ core as an engine: its controller decides what is ready, its fusion, MPI, Gloo or NCCL move it.

The one place below the adapters that loads a framework's binding (horovod.torch, horovod.tensorflow); tensors are
opaque to it. What Horovod cannot do is refused, not done in another way.
"""
