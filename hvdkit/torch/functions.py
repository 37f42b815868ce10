"""Where Horovod's scripts import broadcasts of state from."""

from hvdkit.engine.job_objects import allgather_object, broadcast_object
from hvdkit.torch.state import broadcast_optimizer_state, broadcast_parameters

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
