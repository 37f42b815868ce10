"""Where Horovod's scripts import broadcasts of state from."""

from hvdkit.tensorflow.state import allgather_object, broadcast_object, broadcast_object_fn, broadcast_variables

__all__ = ["allgather_object", "broadcast_object", "broadcast_object_fn", "broadcast_variables"]
