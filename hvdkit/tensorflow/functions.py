"""Broadcasts of state under Horovod's module name."""

from hvdkit.tensorflow.state import allgather_object, broadcast_object, broadcast_object_fn, broadcast_variables

__all__ = ["allgather_object", "broadcast_object", "broadcast_object_fn", "broadcast_variables"]
