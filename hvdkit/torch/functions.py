"""Horovod's functions for objects and state, under its names; torch.compile does not trace them."""

from hvdkit.engine import job_objects
from hvdkit.torch.collective import uncompiled_later
from hvdkit.torch.state import broadcast_optimizer_state, broadcast_parameters

allgather_object = uncompiled_later(job_objects.allgather_object)
broadcast_object = uncompiled_later(job_objects.broadcast_object)

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
